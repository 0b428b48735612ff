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

import torch
from torch import Tensor

from evenspan.topology.layout import FrameRange


def key_bytes(seed: int, *, step: int, epoch: int, sample_id: int, block: int, purpose: str) -> bytes:
    """Eight well mixed bytes of one draw's key (blake2b, RFC 7693)."""
    packed = struct.pack("<5q", seed, step, epoch, sample_id, block) + purpose.encode()
    return hashlib.blake2b(packed, digest_size=8, person=b"evenspan").digest()


def keyed_generator(
    seed: int,
    *,
    step: int = 0,
    sample_id: int = 0,
    block: int = 0,
    purpose: str,
    epoch: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Generator:
    """A fresh generator for one draw; equal keys give equal numbers on one kind of device."""
    key = key_bytes(seed, step=step, epoch=epoch, sample_id=sample_id, block=block, purpose=purpose)
    return torch.Generator(device=device).manual_seed(int.from_bytes(key, "little"))


def block_normal(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    sample_id: int,
    purpose: str,
    frames: FrameRange,
    frame_per_block: int,
    epoch: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers [F local, *shape] of the global latent frames `frames`, on the CPU."""
    parts = [torch.empty(0, *shape)]
    for block, rows in _blocks(frames, frame_per_block):
        generator = keyed_generator(
            seed, step=step, sample_id=sample_id, block=block, purpose=purpose, epoch=epoch
        )
        # The whole block even when a rank or the clip ends inside it: the numbers depend on the size drawn.
        parts.append(torch.randn(frame_per_block, *shape, generator=generator)[rows])
    return torch.cat(parts).to(dtype)


def block_indices(
    levels: int,
    *,
    seed: int,
    step: int,
    sample_id: int,
    purpose: str,
    frames: FrameRange,
    frame_per_block: int,
    epoch: int = 0,
) -> Tensor:
    """One uniform index in [0, levels) per block, repeated for its frames: long [F local], on the CPU."""
    parts = [torch.empty(0, dtype=torch.long)]
    for block, rows in _blocks(frames, frame_per_block):
        generator = keyed_generator(
            seed, step=step, sample_id=sample_id, block=block, purpose=purpose, epoch=epoch
        )
        parts.append(torch.randint(levels, (1,), generator=generator).expand(rows.stop - rows.start))
    return torch.cat(parts)


def batch_normal(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    sample_ids: Sequence[int],
    purpose: str,
    frames: FrameRange,
    frame_per_block: int,
    epochs: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`block_normal` of every sample: [B, F local, *shape]."""
    return torch.stack(
        [
            block_normal(
                shape,
                seed=seed,
                step=step,
                sample_id=sample_id,
                purpose=purpose,
                frames=frames,
                frame_per_block=frame_per_block,
                epoch=epoch,
                dtype=dtype,
            )
            for sample_id, epoch in zip(sample_ids, epochs or [0] * len(sample_ids), strict=True)
        ]
    )


def batch_indices(
    levels: int,
    *,
    seed: int,
    step: int,
    sample_ids: Sequence[int],
    purpose: str,
    frames: FrameRange,
    frame_per_block: int,
    epochs: Sequence[int] = (),
) -> Tensor:
    """`block_indices` of every sample: long [B, F local]."""
    return torch.stack(
        [
            block_indices(
                levels,
                seed=seed,
                step=step,
                sample_id=sample_id,
                purpose=purpose,
                frames=frames,
                frame_per_block=frame_per_block,
                epoch=epoch,
            )
            for sample_id, epoch in zip(sample_ids, epochs or [0] * len(sample_ids), strict=True)
        ]
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
