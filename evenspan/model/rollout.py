"""Generation block by block with cached keys and values, equal to recomputing every block from scratch.

Each block is denoised from noise by Euler steps of the flow (x += (sigma' - sigma) v) while it reads the
clean keys and values of earlier blocks; one more pass at t = 0 writes its own. What a block reads, and so
what the cache keeps, is taken from the attention pattern the model was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from evenspan.attention.patterns import block_causal
from evenspan.attention.spans import Span, SpanTable, TokenRange, merge_ranges
from evenspan.errors import ModelError
from evenspan.model.flow import TIMESTEP_SCALE, FlowSchedule
from evenspan.model.numerics import at_least_fp32
from evenspan.model.wan import CausalWan, expect_shape


class LayerStore:
    """One layer's keys (after rotation) and values of the kept frames, in one buffer that never grows."""

    def __init__(self, *, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.tokens = 0

    def extend(self, k_BTHD: Tensor, v_BTHD: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the kept tokens followed by the given ones; the next call overwrites the latter."""
        if self._buffers is None:
            self._buffers = self._allocate(k_BTHD), self._allocate(v_BTHD)
        stop = self.tokens + k_BTHD.shape[1]
        for buffer, new in zip(self._buffers, (k_BTHD, v_BTHD), strict=True):
            buffer[:, self.tokens : stop] = new
        return self._buffers[0][:, :stop], self._buffers[1][:, :stop]

    def keep(self, ranges: Sequence[TokenRange]) -> None:
        """Keep only these token ranges, moved to the front in order."""
        self.tokens = sum(stop - start for start, stop in ranges)
        if self._buffers is None or (len(ranges) == 1 and ranges[0].start == 0):
            return
        for buffer in self._buffers:
            kept = [buffer[:, start:stop] for start, stop in ranges]
            if kept:
                buffer[:, : self.tokens] = torch.cat(kept, dim=1)

    def _allocate(self, like_BTHD: Tensor) -> Tensor:
        batch, _, heads, features = like_BTHD.shape
        return like_BTHD.new_empty(batch, self._capacity, heads, features)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """Which earlier frames each block reads, and when a frame is read last."""

    blocks: tuple[TokenRange, ...]
    past: tuple[tuple[int, ...], ...]
    """Per block, the earlier frames it reads."""
    last_reader: tuple[int, ...]
    """Per frame, the last block that reads it; -1 when none does."""

    @staticmethod
    def build(frames: int, *, frame_per_block: int, window: int | None, sink: int) -> RolloutPlan:
        """The plan of the block-causal pattern; the last block may be shorter."""
        pattern = block_causal(frames, frame_per_block=frame_per_block, window=window, sink=sink)
        starts = range(0, frames, frame_per_block)
        blocks = tuple(TokenRange(start, min(start + frame_per_block, frames)) for start in starts)
        last_reader = [-1] * frames
        past = []
        for index, block in enumerate(blocks):
            seen = [
                TokenRange(span.k_start, min(span.k_stop, block.start))
                for span in pattern.spans
                if span.q_start <= block.start < span.q_stop
            ]
            past.append(tuple(frame for keys in merge_ranges(seen) for frame in range(*keys)))
            for frame in past[-1]:
                last_reader[frame] = index
        return RolloutPlan(blocks=blocks, past=tuple(past), last_reader=tuple(last_reader))

    @property
    def capacity_frames(self) -> int:
        """Most frames a cache ever holds: those kept before a block and the block itself."""
        kept = [
            sum(1 for frame in range(block.start) if self.last_reader[frame] >= index)
            for index, block in enumerate(self.blocks)
        ]
        return max(held + block.stop - block.start for held, block in zip(kept, self.blocks, strict=True))


class KVCache:
    """The clean keys and values a rollout still needs, for every layer of one model."""

    def __init__(self, plan: RolloutPlan, *, layers: int, tokens_per_frame: int) -> None:
        capacity = plan.capacity_frames * tokens_per_frame
        self.layers = [LayerStore(capacity_tokens=capacity) for _ in range(layers)]
        self.frames: tuple[int, ...] = ()
        self._plan = plan
        self._tokens_per_frame = tokens_per_frame

    def first_frame(self, block: int) -> int:
        """Global position of the block's first frame."""
        return self._plan.blocks[block].start

    def table(self, block: int) -> SpanTable:
        """Queries: the block's tokens. Keys: the cached frames in order, then the block's own."""
        own = self._plan.blocks[block]
        count = own.stop - own.start
        held = len(self.frames)
        wanted = set(self._plan.past[block])
        seen = [TokenRange(i, i + 1) for i, frame in enumerate(self.frames) if frame in wanted]
        assert len(seen) == len(wanted), "a frame was evicted before its last reader"
        keys = merge_ranges([*seen, TokenRange(held, held + count)])
        spans = tuple(Span(0, count, *found) for found in keys)
        return SpanTable(spans, count, held + count).scaled(self._tokens_per_frame)

    def commit(self, block: int) -> None:
        """Take over the keys and values of the block's last forward and drop frames no later block reads."""
        own = self._plan.blocks[block]
        frames = (*self.frames, *range(own.start, own.stop))
        places = [i for i, frame in enumerate(frames) if self._plan.last_reader[frame] > block]
        size = self._tokens_per_frame
        ranges = merge_ranges([TokenRange(i * size, (i + 1) * size) for i in places])
        for layer in self.layers:
            layer.keep(ranges)
        self.frames = tuple(frames[i] for i in places)


@dataclass(frozen=True, slots=True)
class _Branch:
    """One conditioning (the prompts, or the negative prompt) with its own cache."""

    text_BNLE: Tensor
    prompt_of_frame_BF: Tensor
    cache: KVCache


def generate(
    model: CausalWan,
    *,
    text_BNLE: Tensor,
    prompt_of_frame_BF: Tensor,
    frames: int,
    frame_per_block: int,
    shape: tuple[int, int, int],
    schedule: FlowSchedule,
    steps: int,
    noise: Callable[[int], Tensor],
    guidance: float = 1.0,
    negative_text_BNLE: Tensor | None = None,
    window: int | None = None,
    sink: int = 0,
    initial_BFCHW: Tensor | None = None,
) -> Tensor:
    """Latents [B, frames, C, H, W] in at least fp32; the last block may have fewer frames.

    `prompt_of_frame_BF` is the prompt of each frame; `shape` is (C, H, W); `noise(block)` gives the
    start [B, block frames, C, H, W], so the caller decides what it is keyed by. `window` and `sink` are in
    frames and mean what they mean in `attention.patterns`. `initial_BFCHW` are given first frames (image to
    video), kept at t = 0. A guidance g other than 1 adds a second cache: v = v_neg + g (v - v_neg).
    Raises ModelError M106 for guidance without negative text; ShapeError S302.
    """
    if guidance != 1.0 and negative_text_BNLE is None:
        raise ModelError(
            "M106",
            f"guidance is {guidance} and no negative text is given",
            hint="pass negative_text_BNLE (for example the embedded empty prompt), or guidance=1.0",
        )
    plan = RolloutPlan.build(frames, frame_per_block=frame_per_block, window=window, sink=sink)
    batch = text_BNLE.shape[0]
    expect_shape("prompt_of_frame_BF", prompt_of_frame_BF, (batch, frames))
    branches = [_branch(model, plan, text_BNLE, prompt_of_frame_BF, shape)]
    if guidance != 1.0 and negative_text_BNLE is not None:
        negative_map = torch.zeros_like(prompt_of_frame_BF)
        branches.append(_branch(model, plan, negative_text_BNLE, negative_map, shape))
    sigmas = schedule.sampling_sigmas(steps).tolist()
    made = []
    with torch.no_grad():
        for block, own in enumerate(plan.blocks):
            x = at_least_fp32(noise(block))
            expect_shape(f"noise({block})", x, (batch, own.stop - own.start, *shape))
            given = None if initial_BFCHW is None else initial_BFCHW[:, own.start : own.stop].to(x.dtype)
            x = _denoise(model, x, given, branches=branches, block=block, sigmas=sigmas, guidance=guidance)
            made.append(x)
            if block + 1 < len(plan.blocks):
                _write_cache(model, x, branches=branches, block=block)
    return torch.cat(made, dim=1)


def _denoise(
    model: CausalWan,
    x_BFCHW: Tensor,
    given_BFCHW: Tensor | None,
    *,
    branches: Sequence[_Branch],
    block: int,
    sigmas: Sequence[float],
    guidance: float,
) -> Tensor:
    """Euler steps from sigma 1 to 0; the leading given frames stay as they are and are told t = 0."""
    count = 0 if given_BFCHW is None else given_BFCHW.shape[1]
    if given_BFCHW is not None:
        x_BFCHW = torch.cat((given_BFCHW, x_BFCHW[:, count:]), dim=1)
    if count == x_BFCHW.shape[1]:
        return x_BFCHW
    moving = torch.ones(x_BFCHW.shape[:2], dtype=x_BFCHW.dtype, device=x_BFCHW.device)
    moving[:, :count] = 0.0
    for sigma, following in pairwise(sigmas):
        timesteps_BF = moving * (TIMESTEP_SCALE * sigma)
        velocity = _velocity(model, x_BFCHW, timesteps_BF, branch=branches[0], block=block)
        if len(branches) > 1:
            negative = _velocity(model, x_BFCHW, timesteps_BF, branch=branches[1], block=block)
            velocity = negative + guidance * (velocity - negative)
        x_BFCHW = x_BFCHW + (following - sigma) * moving[:, :, None, None, None] * velocity
    return x_BFCHW


def _write_cache(model: CausalWan, x_BFCHW: Tensor, *, branches: Sequence[_Branch], block: int) -> None:
    """One pass at t = 0 over the finished block; its keys and values join the caches."""
    for branch in branches:
        _velocity(model, x_BFCHW, x_BFCHW.new_zeros(x_BFCHW.shape[:2]), branch=branch, block=block)
        branch.cache.commit(block)


def _velocity(
    model: CausalWan, x_BFCHW: Tensor, timesteps_BF: Tensor, *, branch: _Branch, block: int
) -> Tensor:
    batch, count = x_BFCHW.shape[:2]
    start = branch.cache.first_frame(block)
    positions = torch.arange(start, start + count, device=x_BFCHW.device)
    velocity: Tensor = model(
        x_BFCHW,
        timesteps_BF,
        branch.text_BNLE,
        positions_BF=positions.expand(batch, -1),
        prompt_of_frame_BF=branch.prompt_of_frame_BF[:, start : start + count],
        table=branch.cache.table(block),
        caches=branch.cache.layers,
    )
    return velocity.to(x_BFCHW.dtype)


def _branch(
    model: CausalWan, plan: RolloutPlan, text: Tensor, prompts: Tensor, shape: tuple[int, int, int]
) -> _Branch:
    size = model.config.tokens_per_frame(shape[1], shape[2])
    return _Branch(text, prompts, KVCache(plan, layers=model.config.num_layers, tokens_per_frame=size))
