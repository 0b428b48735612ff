"""What evaluation generates: from which samples, and that a clip without causality is one full attention."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoSample
from evenspan.model.initialize import init_weights
from evenspan.model.wan import CausalWan
from evenspan.topology.from_config import frame_layout
from evenspan.topology.layout import FrameRange
from evenspan.train import clips
from evenspan.train.build import build_flow_schedule, build_text_encoder, model_config
from evenspan.train.clips import ClipRequest, clip_requests, make_clip
from evenspan.train.objective import attention_table


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


def config(*, prompts: int, i2v: bool, causal: bool = True) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {
                "model_name": "wan-nano",
                "overrides": {"in_channels": 12, "out_channels": 12},
            },
            "num_frame_per_block": 2,
            "image_or_video_shape": [1, 8, 12, 4, 4],
            "algorithm": {"i2v": i2v, "causal": causal, "teacher_forcing": causal},
            "evaluation": {
                "prompts": [f"prompt {number}" for number in range(prompts)],
                "sampling_steps": 3,
            },
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


class KeptLatents:
    """A codec that keeps what it is asked to decode."""

    def __init__(self) -> None:
        self.latents_FCHW = torch.empty(0)

    def decode(self, latents_FCHW: Tensor) -> Tensor:
        self.latents_FCHW = latents_FCHW
        return torch.zeros(2, 4, 4, 3, dtype=torch.uint8)


def full_attention(config: RunConfig, model: CausalWan, request: ClipRequest, start: Tensor) -> Tensor:
    """The clip by Euler steps over uncached forwards, with the table and prompts of training."""
    frames = config.frames
    sigmas = build_flow_schedule(config).sampling_sigmas(config.evaluation.sampling_steps).tolist()
    moving = torch.ones(1, frames)
    x = start.clone()
    if request.initial_FCHW is not None:
        moving[:, 0] = 0
        x[:, 0] = request.initial_FCHW[0]
    for sigma, following in pairwise(sigmas):
        velocity = model(
            x,
            moving * 1000 * sigma,
            request.text_NLE[None],
            positions_BF=torch.arange(frames)[None],
            prompt_of_frame_BF=(torch.arange(frames) // config.num_frame_per_block)[None].clamp(max=1),
            table=attention_table(config, frame_layout(config)),
        )
        x = x + (following - sigma) * moving[:, :, None, None, None] * velocity
    return x[0]


@pytest.mark.parametrize("i2v", [False, True])
def test_without_causality_a_clip_is_one_full_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, i2v: bool
) -> None:
    made = config(prompts=0, i2v=i2v, causal=False)
    model = CausalWan(model_config(made))
    init_weights(model, seed=3, head_std=0.3)
    request = ClipRequest(
        label="two prompts",
        text_NLE=build_text_encoder(made).encode(["a dog", "a cat"]),
        initial_FCHW=torch.randn(1, 12, 4, 4) if i2v else None,
    )
    codec = KeptLatents()
    starts: list[Tensor] = []
    draw = clips.block_normal

    def recorded(shape: tuple[int, ...], **key: object) -> Tensor:
        starts.append(draw(shape, **key))
        return starts[-1]

    monkeypatch.setattr(clips, "build_codec", lambda _: codec)
    monkeypatch.setattr(clips, "block_normal", recorded)
    make_clip(
        model.state_dict(), made, request, out=tmp_path / "clip.gif", seed=5, device=torch.device("cpu")
    )
    assert len(starts) == 1, "the whole clip is one block"
    with torch.no_grad():
        expected = full_attention(made, model, request, starts[0][None])
    torch.testing.assert_close(codec.latents_FCHW, expected, rtol=0, atol=1e-4)
    assert (expected - starts[0]).abs().max() > 0.1
