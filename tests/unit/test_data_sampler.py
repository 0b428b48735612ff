"""Every sample once per epoch, for any number of dp ranks, across a resume."""

from __future__ import annotations

import pytest

from evenspan.data.sampler import Cursor, SampleSchedule
from evenspan.errors import DataError


def ids(schedule: SampleSchedule, steps: range) -> list[int]:
    return [ref.sample_id for step in steps for ref in schedule.at(step)]


@pytest.mark.parametrize(("size", "global_batch"), [(24, 4), (7, 4), (3, 8), (1, 2)])
def test_each_sample_once_per_epoch(size: int, global_batch: int) -> None:
    seen = ids(SampleSchedule(size=size, seed=1, global_batch=global_batch), range(2 * size))
    for epoch in range(2 * global_batch):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    one = SampleSchedule(size=50, seed=1, global_batch=50)
    two = SampleSchedule(size=50, seed=2, global_batch=50)
    assert len({tuple(one.at(0)), tuple(one.at(1)), tuple(two.at(0))}) == 3
    assert one.at(0) == SampleSchedule(size=50, seed=1, global_batch=50).at(0)
    assert [ref.epoch for ref in one.at(1)] == [1] * 50


@pytest.mark.parametrize("dp_degree", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_slots_partition_the_step(dp_degree: int, micro_batches: int) -> None:
    schedule = SampleSchedule(size=29, seed=3, global_batch=12)
    for step in range(4):
        parts = [
            schedule.slot(step, dp_rank=rank, dp_degree=dp_degree, micro=micro, micro_batches=micro_batches)
            for micro in range(micro_batches)
            for rank in range(dp_degree)
        ]
        assert {len(part) for part in parts} == {12 // dp_degree // micro_batches}
        assert tuple(ref for part in parts for ref in part) == schedule.at(step)


def test_resume_at_another_batch_size_takes_the_next_sample() -> None:
    schedule = SampleSchedule(size=24, seed=5, global_batch=4)
    resumed = SampleSchedule(size=24, seed=5, global_batch=6).resumed(
        step=3, samples_seen=schedule.samples_seen(3)
    )
    seen = ids(schedule, range(3)) + ids(resumed, range(3, 5))
    assert sorted(seen) == list(range(24))
    assert resumed.cursor(5) == Cursor(1, 0)
    assert schedule.cursor(7) == Cursor(1, 4)


def test_order_without_shuffle() -> None:
    assert ids(SampleSchedule(size=3, seed=0, global_batch=2, shuffle=False), range(3)) == [0, 1, 2, 0, 1, 2]


def test_errors_name_the_numbers() -> None:
    with pytest.raises(DataError, match="D501"):
        SampleSchedule(size=0, seed=0, global_batch=1)
    with pytest.raises(DataError, match="D502"):
        SampleSchedule(size=4, seed=0, global_batch=0)
    with pytest.raises(DataError, match=r"D502.*6.*4 dp ranks") as caught:
        SampleSchedule(size=4, seed=0, global_batch=6).slot(0, dp_rank=0, dp_degree=4)
    assert "4 or 8" in caught.value.hint
    with pytest.raises(DataError) as caught:
        SampleSchedule(size=4, seed=0, global_batch=3).slot(0, dp_rank=0, dp_degree=4)
    assert caught.value.hint == "use a global batch of 4"
