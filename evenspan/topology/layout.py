"""Which latent frames each context rank holds: arithmetic only, no process group, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from evenspan.errors import ShapeError


@dataclass(frozen=True, order=True, slots=True)
class FrameRange:
    """Global latent frames start..stop-1."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """Frames in the range; 0 when it is empty."""
        return max(0, self.stop - self.start)

    def intersect(self, other: FrameRange) -> FrameRange:
        """The frames in both; an empty range keeps its start inside `self`."""
        start = min(max(self.start, other.start), self.stop)
        return FrameRange(start, max(start, min(self.stop, other.stop)))

    def shifted(self, frames: int) -> FrameRange:
        """The range moved by `frames`."""
        return FrameRange(self.start + frames, self.stop + frames)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameLayout:
    """Equal contiguous shares of latent frames over `context` ranks.

    Without padding every share is a multiple of frame_per_block and of `multiple` (S201). With padding any
    number is legal: it is filled up to a multiple of context x `multiple`, and blocks may straddle ranks.
    """

    frames: int
    """Real latent frames of the sample."""
    frame_per_block: int
    """Frames denoised together (`num_frame_per_block`)."""
    context: int
    """Ranks that share the sample."""
    padding: bool = False
    """Whether to fill up with frames that carry no loss and are attended by nobody."""
    multiple: int = 1
    """Every share is a multiple of this many frames, where the tensor axis cuts a share again."""

    def __post_init__(self) -> None:
        sizes = {
            "frames": self.frames,
            "num_frame_per_block": self.frame_per_block,
            "sequence_parallel_size": self.context,
            "multiple": self.multiple,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ShapeError(
                    "S202", f"{name} = {size} is not positive", hint=f"write {name} of 1 or more"
                )
        multiple = self.context * lcm(self.frame_per_block, self.multiple)
        if not self.padding and self.frames % multiple:
            raise _not_a_multiple(self, multiple)

    @property
    def padded_frames(self) -> int:
        """Frames over all ranks, padding included."""
        return self.frames_local * self.context

    @property
    def frames_local(self) -> int:
        """Frames one rank holds, padding included; equal on all ranks."""
        unit = self.context * self.multiple
        return -(-self.frames // unit) * self.multiple

    def share(self, context_rank: int) -> FrameRange:
        """The global frames of one rank; may reach past `frames` when padded."""
        assert 0 <= context_rank < self.context, (context_rank, self.context)
        start = context_rank * self.frames_local
        return FrameRange(start, start + self.frames_local)

    @property
    def shares(self) -> tuple[FrameRange, ...]:
        """The share of every rank, in rank order."""
        return tuple(self.share(rank) for rank in range(self.context))

    def valid(self, context_rank: int) -> FrameRange:
        """The real frames among one rank's share; empty when it holds padding only."""
        return self.share(context_rank).intersect(FrameRange(0, self.frames))

    @property
    def blocks(self) -> int:
        """Blocks of real frames; the last may be short when padded."""
        return -(-self.frames // self.frame_per_block)

    def block_of(self, frame: int) -> int:
        """The block a global frame belongs to."""
        return frame // self.frame_per_block


def sequence_layout(tokens: int, *, context: int, tensor: int = 1, padding: bool = False) -> FrameLayout:
    """Equal contiguous shares of a sequence of `tokens` over `context` ranks; its "frames" are tokens.

    `tensor` is the tensor degree where sequence parallelism splits each share again, else 1. Raises
    ShapeError S201 when the tokens do not divide and `padding` is off, S202 for sizes below 1.
    """
    unit = context * tensor
    if not padding and unit > 0 and tokens % unit:
        sizes = [str(size) for size in (tokens // unit * unit, -(-tokens // unit) * unit) if size > 0]
        raise ShapeError(
            "S201",
            f"{tokens} tokens are not a multiple of sequence_parallel_size {context} x tensor {tensor} = "
            f"{unit}",
            hint=f"use a sequence length of {' or '.join(sizes)}, or parallel.padding: auto",
        )
    return FrameLayout(frames=tokens, frame_per_block=1, context=context, multiple=tensor, padding=padding)


def _not_a_multiple(layout: FrameLayout, multiple: int) -> ShapeError:
    below, above = layout.frames // multiple * multiple, -(-layout.frames // multiple) * multiple
    sizes = [str(size) for size in (below, above) if size > 0]
    share = f"num_frame_per_block {layout.frame_per_block}"
    if layout.multiple > 1:
        share = f"the least multiple of {share} and of {layout.multiple} for the tensor ranks"
    return ShapeError(
        "S201",
        f"{layout.frames} latent frames are not a multiple of sequence_parallel_size {layout.context} x "
        f"{share} = {multiple}",
        hint=f"use {' or '.join(sizes)} frames, or parallel.padding: auto",
    )
