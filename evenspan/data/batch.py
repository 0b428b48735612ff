"""One rank's share of a batch of clips, and the exact split and gather of it.

Shapes: B clips, F latent frames (local unless said otherwise), C channels, H x W latent pixels, N prompts,
L text tokens, E text width. Text is whole on every rank; `prompt_of_frame_BF` says which of the N prompts a
frame follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenspan.errors import DataError, ShapeError
from evenspan.topology.layout import FrameLayout, FrameRange


@dataclass(frozen=True, kw_only=True)
class VideoSample:
    """One rank's share of one clip."""

    latents_FCHW: Tensor
    frames: FrameRange
    """Global latent frames of this share, padded frames included."""
    valid_F: Tensor
    """bool; False where no real frame stands: padding of the layout, or of a clip that is too short."""
    sample_id: int
    epoch: int
    text_NLE: Tensor
    prompt_of_frame_F: Tensor
    """long, index into the N prompts of this clip."""
    fingerprint: bytes
    """Identity of the whole clip's content; equal on all ranks that hold a share of it."""


@dataclass(frozen=True, kw_only=True)
class VideoBatch:
    """One rank's share of a micro-batch; its context group holds the other frames of the same clips."""

    latents_BFCHW: Tensor
    frames: FrameRange
    """Global latent frames of this share, padded frames included."""
    valid_BF: Tensor
    """bool; False where no real frame stands: padding of the layout, or of a clip that is too short."""
    sample_ids: tuple[int, ...]
    text_BNLE: Tensor
    """All N prompts of each clip, the same on every rank; rows beyond a clip's own prompts are zero."""
    prompt_of_frame_BF: Tensor
    fingerprint: bytes
    epochs: tuple[int, ...]
    """Epoch of each clip; tells two visits of one clip in the same step apart."""

    def to(self, device: torch.device) -> VideoBatch:
        """The batch with its tensors on `device`."""
        return replace(
            self,
            latents_BFCHW=self.latents_BFCHW.to(device),
            valid_BF=self.valid_BF.to(device),
            text_BNLE=self.text_BNLE.to(device),
            prompt_of_frame_BF=self.prompt_of_frame_BF.to(device),
        )


def collate(samples: Sequence[VideoSample]) -> VideoBatch:
    """The samples as one batch [B, F, ...] in the order given; prompts are zero-padded to the largest N."""
    assert samples, "a batch holds at least one sample"
    first = samples[0]
    for sample in samples[1:]:
        if sample.latents_FCHW.shape != first.latents_FCHW.shape or sample.frames != first.frames:
            raise DataError(
                "D701",
                f"sample {sample.sample_id} has latents {tuple(sample.latents_FCHW.shape)} "
                f"of frames {sample.frames}, "
                f"sample {first.sample_id} has {tuple(first.latents_FCHW.shape)} of {first.frames}",
                hint="give every sample of a batch the same shape and the same range of frames",
            )
    prompts = max(sample.text_NLE.shape[0] for sample in samples)
    text = first.text_NLE.new_zeros(len(samples), prompts, *first.text_NLE.shape[1:])
    for row, sample in enumerate(samples):
        text[row, : sample.text_NLE.shape[0]] = sample.text_NLE
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(sample.fingerprint)
    return VideoBatch(
        latents_BFCHW=torch.stack([sample.latents_FCHW for sample in samples]),
        frames=first.frames,
        valid_BF=torch.stack([sample.valid_F for sample in samples]),
        sample_ids=tuple(sample.sample_id for sample in samples),
        text_BNLE=text,
        prompt_of_frame_BF=torch.stack([sample.prompt_of_frame_F for sample in samples]),
        fingerprint=digest.digest(),
        epochs=tuple(sample.epoch for sample in samples),
    )


def split_video_batch(batch: VideoBatch, *, layout: FrameLayout, context_rank: int) -> VideoBatch:
    """The share of `context_rank`: [B, F, ...] global to [B, F / P, ...] local.

    Frames beyond the clip are zero and invalid, and follow the last real frame's prompt. Raises ShapeError
    S701 when `batch` is not the whole clip of the layout.
    """
    if batch.frames != FrameRange(0, layout.frames) or batch.latents_BFCHW.shape[1] != layout.frames:
        raise ShapeError(
            "S701",
            f"the batch holds frames {batch.frames.start}..{batch.frames.stop} in a tensor of "
            f"{batch.latents_BFCHW.shape[1]} frames, the layout splits {layout.frames}",
            hint="split a whole clip, once",
        )
    share = layout.share(context_rank)
    return VideoBatch(
        latents_BFCHW=_cut(batch.latents_BFCHW, share),
        frames=share,
        valid_BF=_cut(batch.valid_BF, share),
        sample_ids=batch.sample_ids,
        text_BNLE=batch.text_BNLE,
        prompt_of_frame_BF=_cut(batch.prompt_of_frame_BF, share, repeat_last=True),
        fingerprint=batch.fingerprint,
        epochs=batch.epochs,
    )


def gather_video_batch(shares: Sequence[VideoBatch], *, layout: FrameLayout) -> VideoBatch:
    """The whole clip from the shares of all context ranks in order: the inverse of `split_video_batch`."""
    expected = [layout.share(rank) for rank in range(layout.context)]
    if [share.frames for share in shares] != expected:
        raise ShapeError(
            "S702",
            f"the shares hold frames {[(s.frames.start, s.frames.stop) for s in shares]}, "
            f"the layout has {[(e.start, e.stop) for e in expected]}",
            hint="pass one share per context rank, in rank order",
        )
    first = shares[0]

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1)[:, : layout.frames]

    return VideoBatch(
        latents_BFCHW=join([share.latents_BFCHW for share in shares]),
        frames=FrameRange(0, layout.frames),
        valid_BF=join([share.valid_BF for share in shares]),
        sample_ids=first.sample_ids,
        text_BNLE=first.text_BNLE,
        prompt_of_frame_BF=join([share.prompt_of_frame_BF for share in shares]),
        fingerprint=first.fingerprint,
        epochs=first.epochs,
    )


def _cut(x_BF: Tensor, share: FrameRange, *, repeat_last: bool = False) -> Tensor:
    """Frames `share` of dim 1 as a copy; frames past the end are zero, or the last frame's value."""
    frames = x_BF.shape[1]
    part = x_BF[:, min(share.start, frames) : min(share.stop, frames)]
    missing = share.count - part.shape[1]
    if missing == 0:
        return part.clone()
    tail = x_BF[:, -1:] if repeat_last else torch.zeros_like(x_BF[:, -1:])
    return torch.cat([part, tail.expand(-1, missing, *tail.shape[2:])], dim=1)
