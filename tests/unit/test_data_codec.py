"""The pixel codec is invertible, and a share's encode equals slicing the whole clip's."""

from __future__ import annotations

import pytest
import torch

from evenspan.data.codec import PixelCodec
from evenspan.data.grid import raw_frames
from evenspan.errors import DataError
from evenspan.topology.layout import FrameRange


def clip(frames: int, *, temporal: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (raw_frames(frames, temporal=temporal), 8, 16, 3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("temporal", [1, 2, 4])
@pytest.mark.parametrize("spatial", [1, 4])
def test_decode_inverts_encode(temporal: int, spatial: int) -> None:
    codec = PixelCodec(spatial=spatial, temporal=temporal)
    raw = clip(5, temporal=temporal)
    latents = codec.encode(raw)
    assert latents.shape == (5, codec.channels, 8 // spatial, 16 // spatial)
    assert codec.channels == 3 * temporal * spatial**2
    assert torch.equal(codec.decode(latents), raw)
    assert 0.5 < latents.std().item() < 1.5


@pytest.mark.parametrize("temporal", [1, 2, 4])
@pytest.mark.parametrize(("start", "stop"), [(0, 2), (0, 1), (1, 4), (2, 3), (4, 6), (0, 6)])
def test_a_share_equals_the_slice(temporal: int, start: int, stop: int) -> None:
    codec = PixelCodec(spatial=2, temporal=temporal)
    raw, frames = clip(6, temporal=temporal), FrameRange(start, stop)
    low, high = codec.raw_range(frames)
    share = codec.encode(raw[low:high], frames=frames)
    assert torch.equal(share, codec.encode(raw)[start:stop])
    assert torch.equal(codec.decode(share, frames=frames), raw[low:high])


def test_first_latent_repeats_the_first_raw_frame() -> None:
    codec = PixelCodec(spatial=1, temporal=4)
    latents = codec.encode(clip(2, temporal=4))
    assert torch.equal(latents[0, :3], latents[0, 9:])
    assert codec.raw_range(FrameRange(1, 2)) == (1, 5)
    assert codec.raw_range(FrameRange(3, 3)) == (0, 0)


def test_shapes_that_do_not_fit_are_named() -> None:
    codec = PixelCodec(spatial=4, temporal=4)
    with pytest.raises(DataError, match=r"D702.*7 raw frames"):
        codec.encode(torch.zeros(7, 8, 8, 3, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"D702.*9x8"):
        codec.encode(torch.zeros(5, 9, 8, 3, dtype=torch.uint8))
