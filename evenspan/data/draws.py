"""Random numbers that belong to the data: the same for a frame whichever rank holds it, however many ranks
there are.

A generator is keyed by (seed, step, epoch, sample, block, purpose). A block's numbers are always drawn
whole, on the CPU in fp32, and only then cut to a rank's frames, so a block that straddles two ranks still
gets one set of numbers. Nothing is carried from draw to draw, so a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenspan.topology.layout import FrameRange


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawKey:
    """What a draw belongs to. Equal keys give equal numbers; any other field gives unrelated ones."""

    seed: int
    purpose: str
    step: int = 0
    epoch: int = 0
    sample_id: int = 0
    block: int = 0

    def digest(self) -> bytes:
        """Eight well mixed bytes of the key (blake2b, RFC 7693)."""
        numbers = struct.pack("<5q", self.seed, self.step, self.epoch, self.sample_id, self.block)
        return hashlib.blake2b(numbers + self.purpose.encode(), digest_size=8, person=b"evenspan").digest()

    def generator(self, *, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh generator for this draw; equal keys give equal numbers on one kind of device."""
        return torch.Generator(device=device).manual_seed(int.from_bytes(self.digest(), "little"))


def block_normal(
    shape: Sequence[int],
    *,
    key: DrawKey,
    frames: FrameRange,
    frame_per_block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers [F local, *shape] of the global latent frames `frames`, on the CPU."""
    parts = [torch.empty(0, *shape)]
    for block, rows in _blocks(frames, frame_per_block):
        generator = replace(key, block=block).generator()
        # The whole block even when a rank or the clip ends inside it: the numbers depend on the size drawn.
        parts.append(torch.randn(frame_per_block, *shape, generator=generator)[rows])
    return torch.cat(parts).to(dtype)


def block_indices(levels: int, *, key: DrawKey, frames: FrameRange, frame_per_block: int) -> Tensor:
    """One uniform index in [0, levels) per block, repeated for its frames: long [F local], on the CPU."""
    parts = [torch.empty(0, dtype=torch.long)]
    for block, rows in _blocks(frames, frame_per_block):
        generator = replace(key, block=block).generator()
        parts.append(torch.randint(levels, (1,), generator=generator).expand(rows.stop - rows.start))
    return torch.cat(parts)


def batch_normal(
    shape: Sequence[int],
    *,
    keys: Sequence[DrawKey],
    frames: FrameRange,
    frame_per_block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`block_normal` of every sample, one key each: [B, F local, *shape]."""
    return torch.stack(
        [
            block_normal(shape, key=key, frames=frames, frame_per_block=frame_per_block, dtype=dtype)
            for key in keys
        ]
    )


def batch_indices(
    levels: int, *, keys: Sequence[DrawKey], frames: FrameRange, frame_per_block: int
) -> Tensor:
    """`block_indices` of every sample, one key each: long [B, F local]."""
    return torch.stack(
        [block_indices(levels, key=key, frames=frames, frame_per_block=frame_per_block) for key in keys]
    )


def _blocks(frames: FrameRange, frame_per_block: int) -> list[tuple[int, slice]]:
    """Each block that `frames` touches, with the block's own rows that lie in `frames`."""
    if frames.count <= 0:
        return []
    touched = range(frames.start // frame_per_block, (frames.stop - 1) // frame_per_block + 1)
    return [
        (
            block,
            slice(
                max(frames.start - block * frame_per_block, 0),
                min(frames.stop - block * frame_per_block, frame_per_block),
            ),
        )
        for block in touched
    ]
