"""Split and gather of a batch of clips are exact inverses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenspan.data.batch import VideoBatch, VideoSample, collate, gather_video_batch, split_video_batch
from evenspan.errors import DataError, ShapeError
from evenspan.topology.layout import FrameLayout, FrameRange


def make_sample(sample_id: int, *, frames: int, prompts: int = 2) -> VideoSample:
    generator = torch.Generator().manual_seed(sample_id)
    return VideoSample(
        latents_FCHW=torch.randn(frames, 3, 2, 4, generator=generator),
        frames=FrameRange(0, frames),
        valid_F=torch.arange(frames) < frames - 1,
        sample_id=sample_id,
        epoch=0,
        text_NLE=torch.randn(prompts, 5, 6, generator=generator),
        prompt_of_frame_F=torch.arange(frames) * prompts // frames,
        fingerprint=bytes([sample_id]),
    )


def make_batch(frames: int) -> VideoBatch:
    return collate([make_sample(3, frames=frames), make_sample(1, frames=frames, prompts=3)])


def layout_of(frames: int, context: int) -> FrameLayout:
    return FrameLayout(frames=frames, frame_per_block=1, context=context, padding=frames % context > 0)


@pytest.mark.parametrize("frames", [5, 12, 13])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_gather_inverts_split(frames: int, context: int) -> None:
    batch, layout = make_batch(frames), layout_of(frames, context)
    shares = [split_video_batch(batch, layout=layout, context_rank=rank) for rank in range(context)]
    back = gather_video_batch(shares, layout=layout)
    for name in ("latents_BFCHW", "valid_BF", "text_BNLE", "prompt_of_frame_BF"):
        torch.testing.assert_close(back.__dict__[name], batch.__dict__[name], rtol=0, atol=0)
    assert (back.frames, back.sample_ids, back.fingerprint) == (batch.frames, (3, 1), batch.fingerprint)
    assert {share.latents_BFCHW.shape[1] for share in shares} == {-(-frames // context)}


def test_frames_past_the_clip_are_zero_and_invalid() -> None:
    batch = make_batch(5)
    last = split_video_batch(batch, layout=layout_of(5, 4), context_rank=3)
    assert last.frames == FrameRange(6, 8)
    assert not last.valid_BF.any()
    assert not last.latents_BFCHW.any()
    assert last.prompt_of_frame_BF.tolist() == [[1, 1], [2, 2]]


def test_a_share_does_not_alias_the_batch() -> None:
    batch = make_batch(4)
    share = split_video_batch(batch, layout=layout_of(4, 2), context_rank=1)
    share.latents_BFCHW.zero_()
    assert batch.latents_BFCHW[:, 2:].abs().sum() > 0


def test_a_share_is_not_split_again() -> None:
    share = split_video_batch(make_batch(4), layout=layout_of(4, 2), context_rank=1)
    with pytest.raises(ShapeError, match="S701"):
        split_video_batch(share, layout=layout_of(4, 2), context_rank=0)


def test_shares_in_another_order_are_refused() -> None:
    layout = layout_of(4, 2)
    shares = [split_video_batch(make_batch(4), layout=layout, context_rank=rank) for rank in (1, 0)]
    with pytest.raises(ShapeError, match="S702"):
        gather_video_batch(shares, layout=layout)


def test_collate_pads_prompts_and_refuses_other_shapes() -> None:
    batch = make_batch(4)
    assert batch.text_BNLE.shape == (2, 3, 5, 6)
    assert not batch.text_BNLE[0, 2].any()
    with pytest.raises(DataError, match="D701"):
        collate([make_sample(0, frames=4), make_sample(1, frames=5)])


def test_fingerprint_depends_on_every_sample() -> None:
    one, two = make_sample(0, frames=2), make_sample(1, frames=2)
    other = replace(two, fingerprint=b"other")
    assert collate([one, two]).fingerprint != collate([one, other]).fingerprint
    assert collate([one, two]).fingerprint != collate([two, one]).fingerprint
