"""Which source frame stands where: checked against positions worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from evenspan.data.walk import Footage, Timeline, WalkOptions, walk
from evenspan.errors import DataError

OPTIONS = WalkOptions(frame_per_block=2, fps=24.0, random_start=False, scene_cut_prefix="Cut. ")


def film(frames: int, *, fps: Fraction | int = 24, caption: str = "one") -> Footage:
    return Footage(frames=frames, fps=Fraction(fps), caption=caption)


def frames_of(timeline: Timeline, video: int) -> list[int]:
    return [frame for source, frame in timeline.sources if source == video]


def test_one_video_at_the_same_rate() -> None:
    timeline = walk([film(10)], frames=6, options=OPTIONS)
    assert timeline.sources == tuple((0, frame) for frame in range(6))
    assert (timeline.prompts, timeline.prompt_of_frame, timeline.valid_frames) == (("one",), (0,) * 6, 6)


def test_other_rates_round_half_up() -> None:
    timeline = walk([film(30, fps=30)], frames=6, options=OPTIONS)
    assert frames_of(timeline, 0) == [0, 1, 3, 4, 5, 6]
    assert frames_of(walk([film(30, fps=12)], frames=6, options=OPTIONS), 0) == [0, 1, 1, 2, 2, 3]


def test_no_drift_over_a_long_shot() -> None:
    timeline = walk([film(3000, fps=Fraction(30000, 1001))], frames=2000, options=OPTIONS)
    assert timeline.sources[-1] == (0, round(1999 * 30000 / 1001 / 24))


def test_temporal_grid() -> None:
    timeline = walk([film(29 + 32 + 31)], frames=16, options=replace(OPTIONS, frame_per_block=8, temporal=4))
    assert len(timeline.sources) == 61
    with pytest.raises(DataError, match="D301"):
        walk([film(60)], frames=16, options=replace(OPTIONS, frame_per_block=8, temporal=4))


def test_next_video_when_a_chunk_does_not_fit() -> None:
    timeline = walk([film(5), film(9, caption="two")], frames=10, options=OPTIONS)
    assert frames_of(timeline, 0) == [0, 1, 2, 3]
    assert frames_of(timeline, 1) == [0, 1, 2, 3, 4, 5]
    assert timeline.prompts == ("one", "Cut. two", "two")
    assert timeline.prompt_of_frame == (0, 0, 0, 0, 1, 1, 2, 2, 2, 2)


def test_a_video_too_short_for_the_first_chunk_is_no_cut() -> None:
    assert walk([film(1), film(4, caption="two")], frames=4, options=OPTIONS).prompts == ("two",)


def test_forced_cut_skips_a_second() -> None:
    options = replace(OPTIONS, max_chunks_per_shot=2)
    timeline = walk([film(60)], frames=10, options=options)
    assert frames_of(timeline, 0) == [0, 1, 2, 3, 28, 29, 30, 31, 56, 57]
    assert timeline.prompt_of_frame == (0, 0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert timeline.prompts == ("one", "Cut. one")


def test_uniform_prompt_stays_in_one_video() -> None:
    options = replace(OPTIONS, uniform_prompt=True)
    videos = [film(5), film(9, caption="two"), film(20, caption="three")]
    assert walk(videos, frames=8, options=options).prompts == ("two",)
    with pytest.raises(DataError, match=r"D301.*20 frames available"):
        walk(videos, frames=22, options=options)


def test_too_short_names_what_is_there() -> None:
    with pytest.raises(DataError, match=r"D301 sample 'x' has 4 frames available.*needs 6.*5 at 24 fps"):
        walk([film(5)], frames=6, options=OPTIONS, name="x")
    with pytest.raises(DataError, match=r"D301.*has 0 frames"):
        walk([film(1)], frames=6, options=replace(OPTIONS, allow_padding=True))


def test_padding_repeats_the_last_frame_and_caption() -> None:
    options = replace(OPTIONS, allow_padding=True)
    timeline = walk([film(3), film(3, caption="two")], frames=9, options=options)
    assert timeline.sources[4:] == ((1, 1),) * 5
    assert timeline.prompts == ("one", "Cut. two", "two")
    assert timeline.prompt_of_frame == (0, 0, 1, 1, 2, 2, 2, 2, 2)
    assert timeline.valid_frames == 4
    with pytest.raises(DataError, match=r"D302.*4 latent frames"):
        walk([film(5)], frames=8, options=replace(options, min_latent_frames=6))


def test_last_block_may_be_short() -> None:
    timeline = walk([film(7)], frames=7, options=replace(OPTIONS, frame_per_block=4))
    assert frames_of(timeline, 0) == list(range(7))


def test_random_start_is_uniform_over_what_fits() -> None:
    options = replace(OPTIONS, random_start=True)
    starts = {
        walk([film(12), film(3)], frames=4, options=options, rng=random.Random(seed)).sources[0]
        for seed in range(200)
    }
    # From 9 on the second chunk comes from the second video; the first chunk must still fit.
    assert starts == {(0, frame) for frame in range(11)}


def test_random_start_falls_back_to_the_beginning() -> None:
    options = replace(OPTIONS, random_start=True, allow_padding=True)
    assert walk([film(3)], frames=8, options=options, rng=random.Random(1)).sources[0] == (0, 0)
