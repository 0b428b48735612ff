"""A frame's random numbers do not depend on how many ranks there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenspan.data.draws import DrawKey, batch_indices, batch_normal, block_indices, block_normal
from evenspan.topology.layout import FrameLayout, FrameRange

KEY = DrawKey(seed=7, step=3, sample_id=5, purpose="noise")


@pytest.mark.parametrize("frame_per_block", [1, 3, 4, 8])
@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("frames", [12, 13])
def test_any_number_of_ranks_draws_the_same(frames: int, context: int, frame_per_block: int) -> None:
    layout = FrameLayout(frames=frames, frame_per_block=1, context=context, padding=frames % context > 0)
    whole = {"frames": FrameRange(0, frames), "frame_per_block": frame_per_block}
    normal = block_normal((2, 3), key=KEY, **whole)
    indices = block_indices(1000, key=KEY, **whole)
    shares = [{**whole, "frames": layout.share(rank)} for rank in range(context)]
    joined = torch.cat([block_normal((2, 3), key=KEY, **share) for share in shares])
    assert torch.equal(joined[:frames], normal)
    assert torch.equal(
        torch.cat([block_indices(1000, key=KEY, **share) for share in shares])[:frames], indices
    )
    assert joined.shape[0] == layout.frames_local * context


def test_one_index_per_block() -> None:
    indices = block_indices(10**6, key=KEY, frames=FrameRange(1, 9), frame_per_block=4)
    assert len(set(indices[:3].tolist())) == len(set(indices[3:7].tolist())) == 1
    assert len(set(indices.tolist())) == 3


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"step": 4}, {"sample_id": 6}, {"purpose": "other"}, {"epoch": 1}]
)
def test_every_part_of_the_key_counts(change: dict) -> None:
    where = {"frames": FrameRange(0, 4), "frame_per_block": 2}
    base = block_normal((8,), key=KEY, **where)
    assert not torch.equal(base, block_normal((8,), key=replace(KEY, **change), **where))
    assert not torch.equal(base[:2], base[2:])


def test_numbers_are_standard_normal_in_any_dtype() -> None:
    where = {"frames": FrameRange(0, 64), "frame_per_block": 8}
    x = block_normal((16, 16), key=KEY, **where)
    assert abs(x.mean().item()) < 0.03
    assert abs(x.std().item() - 1) < 0.03
    x64 = block_normal((16, 16), key=KEY, **where, dtype=torch.float64)
    assert torch.equal(x64, x.double())


def test_an_empty_range_draws_nothing() -> None:
    where = {"frames": FrameRange(4, 4), "frame_per_block": 2}
    assert block_normal((3,), key=KEY, **where).shape == (0, 3)
    assert block_indices(9, key=KEY, **where).shape == (0,)


def test_batch_forms_stack_the_samples() -> None:
    where = {"frames": FrameRange(1, 4), "frame_per_block": 2}
    keys = [replace(KEY, sample_id=4, epoch=epoch) for epoch in (0, 1)]
    x = batch_normal((2,), keys=keys, **where)
    assert torch.equal(x[0], block_normal((2,), key=keys[0], **where))
    assert not torch.equal(x[0], x[1])
    indices = batch_indices(1000, keys=keys, **where)
    assert torch.equal(indices[1], block_indices(1000, key=keys[1], **where))


def test_a_generator_is_fresh_each_time() -> None:
    key = DrawKey(seed=1, purpose="x")
    assert torch.equal(torch.rand(4, generator=key.generator()), torch.rand(4, generator=key.generator()))


def test_numbers_stay_what_they_were() -> None:
    """A resumed run draws on: the digest of a key may never change."""
    key = DrawKey(seed=1, step=2, epoch=3, sample_id=4, block=5, purpose="noise")
    assert key.digest().hex() == "6a3e6d6e7c246b2f"
