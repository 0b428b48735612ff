import pytest

from evenspan.config.schema import RunConfig
from evenspan.errors import ShapeError
from evenspan.topology.from_config import frame_layout
from evenspan.topology.layout import FrameLayout, FrameRange, sequence_layout


def test_shipped_shape_splits_evenly():
    layout = FrameLayout(frames=96, frame_per_block=8, context=4)
    assert layout.shares == (FrameRange(0, 24), FrameRange(24, 48), FrameRange(48, 72), FrameRange(72, 96))
    assert (layout.padded_frames, layout.frames_local, layout.blocks) == (96, 24, 12)
    assert [layout.block_of(frame) for frame in (0, 7, 8, 95)] == [0, 0, 1, 11]


def test_padding_fills_up_to_the_ranks_only():
    layout = FrameLayout(frames=81, frame_per_block=8, context=4, padding=True)
    assert (layout.padded_frames, layout.frames_local, layout.blocks) == (84, 21, 11)
    assert [layout.valid(rank).count for rank in range(4)] == [21, 21, 21, 18]
    assert layout.share(3) == FrameRange(63, 84)


def test_a_rank_may_hold_padding_only():
    layout = FrameLayout(frames=5, frame_per_block=2, context=4, padding=True)
    assert [layout.valid(rank).count for rank in range(4)] == [2, 2, 1, 0]
    assert layout.valid(3) == FrameRange(6, 6)


def test_frames_that_do_not_divide_are_named_with_the_nearest_legal_ones():
    with pytest.raises(ShapeError, match=r"81 latent frames .* 4 x num_frame_per_block 8 = 32") as raised:
        FrameLayout(frames=81, frame_per_block=8, context=4)
    assert raised.value.code == "S201"
    assert "64 or 96" in raised.value.hint
    with pytest.raises(ShapeError) as raised:
        FrameLayout(frames=4, frame_per_block=8, context=4)
    assert "use 32 frames" in raised.value.hint


@pytest.mark.parametrize("field", ["frames", "frame_per_block", "context"])
def test_sizes_below_one_are_refused(field):
    with pytest.raises(ShapeError) as raised:
        FrameLayout(**{"frames": 8, "frame_per_block": 2, "context": 2, field: 0})
    assert raised.value.code == "S202"


def test_frame_ranges():
    assert FrameRange(2, 6).intersect(FrameRange(4, 9)) == FrameRange(4, 6)
    assert FrameRange(2, 6).intersect(FrameRange(8, 9)).count == 0
    assert FrameRange(2, 6).shifted(3) == FrameRange(5, 9)


def test_a_sequence_is_split_over_context_and_again_over_tensor():
    layout = sequence_layout(24, context=2, tensor=3)
    assert (layout.frames_local, layout.padded_frames) == (12, 24)
    padded = sequence_layout(25, context=2, tensor=3, padding=True)
    assert (padded.frames_local, padded.padded_frames) == (15, 30)
    assert [padded.valid(rank).count for rank in range(2)] == [15, 10]
    assert sequence_layout(25, context=2, padding=True).padded_frames == 26


def test_a_sequence_that_does_not_divide_is_named_in_tokens():
    with pytest.raises(ShapeError, match=r"25 tokens .* 2 x tensor 3 = 6") as raised:
        sequence_layout(25, context=2, tensor=3)
    assert raised.value.code == "S201"
    assert "24 or 30" in raised.value.hint
    for sizes in ({"tokens": 0, "context": 2}, {"tokens": 8, "context": 2, "tensor": 0}):
        with pytest.raises(ShapeError, match="S202"):
            sequence_layout(**sizes)


def clip(*, teacher_forcing: bool, padding: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {"model_name": "wan-nano"},
            "image_or_video_shape": [1, 6, 4, 4, 4],
            "sequence_parallel_size": 2,
            "num_frame_per_block": 3,
            "algorithm": {"teacher_forcing": teacher_forcing},
            "parallel": {"backend_kwargs": {"sequence_parallel": True}, "padding": padding},
            "data": {"data_path": "unused"},
        }
    )


@pytest.mark.parametrize(("teacher_forcing", "multiple"), [(True, 2), (False, 4)])
def test_tensor_shards_hold_whole_frames(teacher_forcing, multiple):
    layout = frame_layout(clip(teacher_forcing=teacher_forcing, padding="auto"), tensor=4)
    assert (layout.multiple, layout.frames_local) == (multiple, 4)
    with pytest.raises(ShapeError, match=r"S201 .* least multiple of .* for the tensor ranks = \d+"):
        frame_layout(clip(teacher_forcing=teacher_forcing, padding="error"), tensor=4)
