"""Micro-batches follow the schedule, with and without a background thread."""

from __future__ import annotations

import pytest
import torch

from evenspan.data.batch import VideoBatch, VideoSample, collate
from evenspan.data.loader import MicroBatchLoader
from evenspan.data.sampler import SampleSchedule
from evenspan.errors import DataError
from evenspan.topology.layout import FrameRange


class Numbers:
    """Sample i has latents of value i; sample `bad` fails."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 7

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> VideoSample:
        if sample_id == self.bad:
            raise DataError("D202", f"sample {sample_id}", hint="none")
        return VideoSample(
            latents_FCHW=torch.full((frames.count, 1, 1, 1), float(sample_id)),
            frames=frames,
            valid_F=torch.ones(frames.count, dtype=torch.bool),
            sample_id=sample_id,
            epoch=epoch,
            text_NLE=torch.zeros(1, 1, 2),
            prompt_of_frame_F=torch.zeros(frames.count, dtype=torch.long),
            fingerprint=bytes([sample_id, epoch]),
        )


SCHEDULE = SampleSchedule(size=7, seed=2, global_batch=4)


def loader(dataset: Numbers | None = None, **changes: int) -> MicroBatchLoader[VideoSample, VideoBatch]:
    options = {"dp_rank": 0, "dp_degree": 1, "micro_batches": 2, "prefetch": 0, **changes}
    share = FrameRange(2, 4)
    return MicroBatchLoader(dataset or Numbers(), collate=collate, schedule=SCHEDULE, frames=share, **options)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_steps_see_the_schedule(prefetch: int) -> None:
    with loader(prefetch=prefetch) as batches:
        for step in (0, 1, 2, 9, 1):
            seen = list(batches.step(step))
            refs = SCHEDULE.at(step)
            assert [i for batch in seen for i in batch.sample_ids] == [ref.sample_id for ref in refs]
            assert [e for batch in seen for e in batch.epochs] == [ref.epoch for ref in refs]
            assert seen[0].latents_BFCHW.shape == (2, 2, 1, 1, 1)
            assert seen[0].frames == FrameRange(2, 4)


def test_dp_ranks_share_out_the_step() -> None:
    ids = [
        loader(dp_rank=rank, dp_degree=2).batch(3, micro=micro).sample_ids
        for micro in (0, 1)
        for rank in (0, 1)
    ]
    assert [i for part in ids for i in part] == [ref.sample_id for ref in SCHEDULE.at(3)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_sample_fails_at_its_own_batch(prefetch: int) -> None:
    bad = SCHEDULE.at(1)[2].sample_id
    with loader(Numbers(bad), prefetch=prefetch) as batches:
        good = [
            place
            for place in range(4)
            if bad not in {r.sample_id for r in SCHEDULE.at(place // 2)[place % 2 * 2 :][:2]}
        ]
        for place in range(4):
            step, micro = divmod(place, 2)
            if place in good:
                assert bad not in batches.batch(step, micro=micro).sample_ids
            else:
                with pytest.raises(DataError, match="D202"):
                    batches.batch(step, micro=micro)
    assert 3 not in good


def test_a_batch_that_cannot_be_split_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="D502"):
        loader(dp_degree=3)
