"""From raw frames to latents and back, by range: a rank encodes only the raw frames of its own latent
frames.

Latent frame 0 stands for raw frame 0; latent frame k >= 1 for raw frames t(k-1)+1 .. tk, with t the
temporal factor (the frame grid of Wan2.2's VAE). `PixelCodec` is a rearrangement: no weights, exactly
invertible; it stands where a VAE can stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from evenspan.data.grid import raw_frames
from evenspan.errors import DataError
from evenspan.topology.layout import FrameRange


class Codec(Protocol):
    """What a data set needs from a codec."""

    @property
    def channels(self) -> int:
        """Latent channels."""
        ...

    @property
    def spatial(self) -> int:
        """Pixels per latent pixel, along height and width."""
        ...

    @property
    def temporal(self) -> int:
        """Raw frames per latent frame."""
        ...

    def raw_range(self, frames: FrameRange) -> tuple[int, int]:
        """First and last + 1 raw frame that `encode` needs for the latent frames `frames`."""
        ...

    def encode(self, raw_THWC: Tensor, *, frames: FrameRange | None = None) -> Tensor:
        """Latents [F, C, H/s, W/s] fp32 from uint8 frames [T, H, W, 3] of `raw_range(frames)`."""
        ...

    def decode(self, latents_FCHW: Tensor, *, frames: FrameRange | None = None) -> Tensor:
        """uint8 frames [T, H, W, 3] of latents; T covers `frames`, by default a clip from its start."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelCodec:
    """Space-to-depth: each s x s patch of t raw frames becomes 3 t s^2 channels of about unit deviation."""

    spatial: int = 4
    temporal: int = 1

    @property
    def channels(self) -> int:
        """Latent channels, 3 t s^2."""
        return 3 * self.temporal * self.spatial**2

    def raw_range(self, frames: FrameRange) -> tuple[int, int]:
        """First and last + 1 raw frame of the latent frames `frames`; no halo."""
        if frames.count <= 0:
            return 0, 0
        start = 0 if frames.start == 0 else raw_frames(frames.start, temporal=self.temporal)
        return start, raw_frames(frames.stop, temporal=self.temporal)

    def encode(self, raw_THWC: Tensor, *, frames: FrameRange | None = None) -> Tensor:
        """Latents [F, C, H/s, W/s] fp32 of uint8 frames [T, H, W, 3], equal to slicing the clip's encode.

        Without `frames` the raw frames are a whole clip. Raises DataError D702 when T, H or W does not fit.
        """
        count = raw_THWC.shape[0]
        frames = FrameRange(0, 1 + (count - 1) // self.temporal) if frames is None else frames
        start, stop = self.raw_range(frames)
        height, width = raw_THWC.shape[1:3]
        if count != stop - start or height % self.spatial or width % self.spatial:
            raise DataError(
                "D702",
                f"{count} raw frames of {height}x{width} pixels for latent frames "
                f"{frames.start}..{frames.stop}: {stop - start} raw frames and sides divisible by "
                f"{self.spatial} are needed",
                hint=f"use 1 + {self.temporal}k raw frames and multiples of {self.spatial} pixels",
            )
        if frames.start == 0 and self.temporal > 1 and count:
            # Latent 0 has one raw frame where the others have t; its copies keep the channel layout uniform.
            raw_THWC = torch.cat([raw_THWC[:1].expand(self.temporal - 1, -1, -1, -1), raw_THWC])
        latents = rearrange(
            raw_THWC,
            "(f t) (h p) (w q) c -> f (t c p q) h w",
            t=self.temporal,
            p=self.spatial,
            q=self.spatial,
        )
        # Natural images have a deviation of about half of [-1, 1]; the factor 2 brings it near the noise's.
        return (latents.to(torch.float32) / 127.5 - 1.0) * 2.0

    def decode(self, latents_FCHW: Tensor, *, frames: FrameRange | None = None) -> Tensor:
        """uint8 frames [T, H, W, 3]; the inverse of `encode`. Values beyond the colours are clamped."""
        starts_clip = frames is None or frames.start == 0
        raw = rearrange(
            latents_FCHW.to(torch.float32),
            "f (t c p q) h w -> (f t) (h p) (w q) c",
            t=self.temporal,
            p=self.spatial,
            q=self.spatial,
        )
        raw = ((raw / 2.0 + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return raw[self.temporal - 1 :] if starts_clip else raw
