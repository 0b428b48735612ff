"""What the hooks of one model's tensor plan share: its ranks, the lengths of this forward, its randomness."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Region:
    """The tensor-parallel region of one model: between its entry and its exit, tensors are shards.

    A shard is this rank's part of a tensor along the sequence dim, [B, T / ranks, ...] for dim 1. Lengths
    that the ranks do not divide are legal with `padding`: the last shards end in zeros, which no gather
    returns.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    padding: bool = False
    inside: bool = False
    """Whether the forward that runs now is between entry and exit."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Whole length by shard length, of what this forward cut."""
    running: bool = False
    """Whether a forward of the whole model runs; a block recomputed in backward runs outside of one."""
    _last: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None
    _kept: Tensor | None = None
    _replicated_rng: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """The tensor degree."""
        return self.group.size()

    def begin(self) -> None:
        """A forward of the whole model starts."""
        self.inside, self.running = False, True
        self.lengths.clear()
        self._last = self._kept = None

    def end(self) -> None:
        """A forward of the whole model is over, or died."""
        self.inside = self.running = False
        self._last = self._kept = None
        self.leave_rank_stream(all_levels=True)

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
        if self._last is not None and self._last[0]() is x and (known := self._last[1]()) is not None:
            return known
        whole = self.gather(x, dim, at) if self.sequence_parallel else self.copy(x)
        self._last = (weakref.ref(x), weakref.ref(whole))
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

    def enter_rank_stream(self) -> None:
        """Draw from a stream of this rank's own until `leave_rank_stream`; the common one moves one draw."""
        seed = int(torch.randint(0, 2**62, ()).item())
        self._replicated_rng.append(_rng_state())
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (self.group.rank() + 1)) % 2**63)

    def leave_rank_stream(self, *, all_levels: bool = False) -> None:
        """Back to the stream that all tensor ranks share."""
        while self._replicated_rng:
            _set_rng_state(self._replicated_rng.pop())
            if not all_levels:
                return

    @contextmanager
    def common_stream(self) -> Iterator[None]:
        """Draws inside are the same on all tensor ranks, even within a rank's own stream."""
        if not self._replicated_rng:
            yield
            return
        own = _rng_state()
        _set_rng_state(self._replicated_rng[-1])
        try:
            yield
        finally:
            self._replicated_rng[-1] = _rng_state()
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


def _rng_state() -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def _set_rng_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
