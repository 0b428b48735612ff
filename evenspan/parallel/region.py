"""What the hooks of one model's tensor plan share: its ranks, the lengths of this forward, its randomness."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evenspan.comm.collectives import (
    Loss,
    all_reduce_sum,
    copy_to_ranks,
    gather_tokens,
    reduce_scatter_tokens,
    split_tokens,
)
from evenspan.errors import PlanError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

REMEMBERED = 4096
"""How many forwards, and calls of repeated modules, can be recomputed in backward: the latest ones."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A gathered tensor and what it was gathered of."""

    shard: weakref.ref[Tensor]
    whole: weakref.ref[Tensor]
    at: tuple[object, ...]
    whole_version: int


@dataclass(slots=True)
class Region:
    """The tensor-parallel region of one model: between its entry and its exit, tensors are shards.

    A shard is this rank's part of a tensor along the sequence dim, [B, T / ranks, ...] for dim 1. Lengths
    that the ranks do not divide are legal with `padding`: the last shards end in zeros, which no gather
    returns.

    A block that is recomputed in backward runs outside of any forward, but with the random state of its own:
    the seed of this rank's stream tells which forward it belongs to.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    padding: bool = False
    inside: bool = False
    """Whether the forward that runs now is between entry and exit."""
    running: bool = False
    """Whether a forward of the whole model runs; a block recomputed in backward runs outside of one."""
    _lengths: dict[int, int] = field(default_factory=dict)
    _lengths_of: OrderedDict[int, dict[int, int]] = field(default_factory=OrderedDict)
    _last: _Gathered | None = None
    _kept: Tensor | None = None
    _replicated_rng: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    _repeated: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def __deepcopy__(self, memo: dict[int, object]) -> Region:
        """A region of its own over the same ranks, for a copied model."""
        del memo
        return Region(self.group, self.sequence_parallel, self.padding)

    @property
    def ranks(self) -> int:
        """The tensor degree."""
        return self.group.size()

    def begin(self) -> None:
        """A forward of the whole model starts."""
        self.inside, self.running = False, True
        self._lengths = {}
        self._last = self._kept = None

    def end(self) -> None:
        """A forward of the whole model is over, or died."""
        self.inside = self.running = False
        self._last = self._kept = None
        self.leave_rank_stream(all_levels=True)

    @property
    def lengths(self) -> dict[int, int]:
        """Whole length by shard length, of what this forward cut, or the one that is recomputed."""
        if self.running or not self._lengths_of:
            return self._lengths
        return self._lengths_of.get(torch.initial_seed(), self._lengths)

    def is_inside(self) -> bool:
        """Whether what runs now is between entry and exit, also when it is recomputed."""
        return self.inside if self.running else torch.initial_seed() in self._lengths_of

    def enter(self) -> None:
        """From here on tensors are shards."""
        self.inside = True
        seed = self.enter_rank_stream()
        _remember(self._lengths_of, seed, self._lengths)

    def leave(self) -> None:
        """From here on tensors are whole."""
        self.inside = False
        self.leave_rank_stream()

    # -- boundaries ---------------------------------------------------------------------------------------

    def note_length(self, length: int, at: str) -> None:
        """Remember that a tensor of `length` was cut into shards at `at`. Raises P112."""
        if length % self.ranks and not self.padding:
            below, above = length // self.ranks * self.ranks, -(-length // self.ranks) * self.ranks
            legal = [str(size) for size in (below, above) if size > 0]
            raise PlanError(
                "P112",
                f"{at}: {length} tokens cannot be shared by {self.ranks} tensor ranks",
                hint=f"use {' or '.join(legal)} tokens, or parallel.padding: auto",
            )
        shard = -(-length // self.ranks)
        known = self.lengths.pop(shard, length)
        if known != length:
            raise PlanError(
                "P112",
                f"{at}: shards of {shard} tokens stand for {known} tokens already and now for {length}",
                hint=f"pad both to {shard * self.ranks} tokens, or cut sequences of other lengths",
            )
        self.lengths[shard] = length

    def split(self, x: Tensor, dim: int, at: str) -> Tensor:
        """The shard of a tensor that all ranks hold alike; everything before it has whole gradients."""
        expect_dim(x, dim, at)
        self.note_length(x.shape[dim], at)
        return split_tokens(x, dim=dim, group=self.group, loss=Loss.REPEATED, padding=self.padding)

    def gather(self, x: Tensor, dim: int, at: str, *, repeated: bool = False) -> Tensor:
        """The whole of a shard. `repeated`: what follows is the same work on every rank."""
        self.expect_shard(x, dim, at)
        loss = Loss.REPEATED if repeated else Loss.SHARED
        return gather_tokens(x, dim=dim, group=self.group, loss=loss, length=self.lengths[x.shape[dim]])

    def gather_once(self, x: Tensor, dim: int, at: str) -> Tensor:
        """`gather`, or `copy` without sequence parallelism; the same tensor again for the same `x`."""
        at_now = (dim, _version(x), torch.is_grad_enabled())
        if (
            self._last is not None
            and self._last.shard() is x
            and self._last.at == at_now
            and (known := self._last.whole()) is not None
            and _version(known) == self._last.whole_version
        ):
            return known
        whole = self.gather(x, dim, at) if self.sequence_parallel else self.copy(x)
        self._last = _Gathered(weakref.ref(x), weakref.ref(whole), at_now, _version(whole))
        # Held until the next one, so that readers that save nothing for backward share it too.
        self._kept = whole if self.running else None
        return whole

    def copy(self, x: Tensor) -> Tensor:
        """`x`, whose gradient is summed over the ranks."""
        return copy_to_ranks(x, group=self.group)

    def reduce(self, x: Tensor, dim: int, at: str) -> Tensor:
        """The sum of partial outputs: shards under sequence parallelism, whole otherwise."""
        if not self.sequence_parallel:
            return all_reduce_sum(x, group=self.group, loss=Loss.REPEATED)
        expect_dim(x, dim, at)
        self.note_length(x.shape[dim], at)
        return reduce_scatter_tokens(x, dim=dim, group=self.group, padding=self.padding)

    def expect_shard(self, x: Tensor, dim: int, at: str) -> None:
        """Raise PlanError P111 unless `x` is as long as a shard of this forward."""
        expect_dim(x, dim, at)
        size = x.shape[dim]
        if size in self.lengths:
            return
        if not self.lengths:
            raise PlanError(
                "P111",
                f"{at} expects a shard and got {list(x.shape)}, but nothing cut the sequence yet",
                hint='plan the entry before it as "split", "enter" or "vocab_sequence"',
            )
        shard, whole = next(reversed(self.lengths.items()))
        expected = list(x.shape)
        expected[dim] = shard
        kind = "the whole sequence" if size == whole else "another length"
        raise PlanError(
            "P111",
            f"{at} expects a shard of shape {expected} and got {kind}: {list(x.shape)} "
            f"({whole} tokens over {self.ranks} tensor ranks)",
            hint='cut it before with "split" or "enter", or run the module on gathered input',
        )

    # -- randomness ---------------------------------------------------------------------------------------

    def enter_rank_stream(self) -> int:
        """Draw from a stream of this rank's own until `leave_rank_stream`; the common one moves one draw.

        Returns the seed of this rank's stream.
        """
        common = _draw_seed()
        self._replicated_rng.append(_rng_state())
        seed = (common + 0x9E3779B97F4A7C15 * (self.group.rank() + 1)) % 2**63
        torch.manual_seed(seed)
        return seed

    def leave_rank_stream(self, *, all_levels: bool = False) -> None:
        """Back to the stream that all tensor ranks share."""
        while self._replicated_rng:
            _set_rng_state(self._replicated_rng.pop())
            if not all_levels:
                return

    @contextmanager
    def common_stream(self) -> Iterator[None]:
        """Draws inside are the same on all tensor ranks, even within a rank's own stream, or recomputed."""
        own = _rng_state()
        here = _digest(own)
        seed = None if self.running else self._repeated.get(here)
        if seed is None and self._replicated_rng:
            _set_rng_state(self._replicated_rng[-1])
            seed = _draw_seed()
            self._replicated_rng[-1] = _rng_state()
            _remember(self._repeated, here, seed)
        if seed is None:
            yield
            return
        torch.manual_seed(seed)
        try:
            yield
        finally:
            _set_rng_state(own)


def expect_dim(x: Tensor, dim: int, at: str) -> None:
    """Raise PlanError P107 unless `dim` is a dimension of `x` other than its last."""
    if not 0 <= dim < x.dim() - 1:
        raise PlanError(
            "P107",
            f"{at}: sequence dim {dim} of a tensor of shape {list(x.shape)}",
            hint=f"write SEQUENCE_PARALLEL_SEQUENCE_DIM from 0 to {x.dim() - 2}; "
            "1 for [batch, sequence, hidden], 0 for [sequence, batch, hidden]",
        )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)


def _draw_seed() -> int:
    return int(torch.randint(0, 2**62, (), device="cpu").item())


def _digest(state: tuple[Tensor, Tensor | None]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in state:
        if part is not None:
            digest.update(part.numpy().tobytes())
    return digest.digest()


def _rng_state() -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_rng_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
