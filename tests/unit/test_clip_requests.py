"""What evaluation generates, and which samples it reads for that."""

from __future__ import annotations

import pytest
import torch

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoSample
from evenspan.topology.layout import FrameRange
from evenspan.train.clips import clip_requests


class CountedDataset:
    """Six samples that remember which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 6

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> VideoSample:
        assert (epoch, frames) == (0, FrameRange(0, 1))
        self.read.append(sample_id)
        return VideoSample(
            latents_FCHW=torch.full((1, 12, 4, 4), float(sample_id)),
            text_NLE=torch.full((2, 4, 16), float(sample_id)),
            prompt_of_frame_F=torch.zeros(1, dtype=torch.long),
            valid_F=torch.ones(1, dtype=torch.bool),
            frames=frames,
            sample_id=sample_id,
            epoch=epoch,
            fingerprint=b"",
        )


def config(*, prompts: int, i2v: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {"model_name": "wan-nano"},
            "image_or_video_shape": [1, 8, 12, 4, 4],
            "algorithm": {"i2v": i2v},
            "evaluation": {"prompts": [f"prompt {number}" for number in range(prompts)]},
            "data": {"data_path": "somewhere", "text": {"length": 4}},
        }
    )


@pytest.mark.parametrize(
    ("prompts", "i2v", "read"),
    [
        (0, False, [0, 1, 2, 3]),
        (0, True, [0, 1, 2, 3]),
        (2, False, []),
        (2, True, [0, 1]),
        (5, True, [0, 1, 2, 3, 0]),
    ],
)
def test_only_what_is_needed_is_read(prompts: int, i2v: bool, read: list[int]) -> None:
    dataset = CountedDataset()
    requests = list(clip_requests(config(prompts=prompts, i2v=i2v), dataset))
    assert dataset.read == read
    assert len(requests) == (prompts or 4)
    for number, request in enumerate(requests):
        assert request.label == (f"prompt {number}" if prompts else f"sample {number}")
        assert (request.initial_FCHW is None) is not i2v
        if i2v:
            assert request.initial_FCHW.flatten()[0] == read[number]
        if not prompts:
            assert torch.equal(request.text_NLE, torch.full((1, 4, 16), float(number)))


def test_the_first_request_reads_one_sample() -> None:
    dataset = CountedDataset()
    next(clip_requests(config(prompts=0, i2v=True), dataset))
    assert dataset.read == [0]
