"""Clips made from weights by block-wise causal rollout, as evaluation and `evenspan sample` make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenspan.config.schema import RunConfig
from evenspan.data.draws import DrawKey, block_normal
from evenspan.data.export import write_clip
from evenspan.data.latents_dataset import LatentsDataset
from evenspan.data.video_dataset import VideoDataset
from evenspan.model.rollout import generate
from evenspan.model.wan import CausalWan
from evenspan.topology.layout import FrameRange
from evenspan.train.build import (
    attention_window,
    build_codec,
    build_flow_schedule,
    build_text_encoder,
    model_config,
)

_DEFAULT_CLIPS = 4


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """What one clip is generated from."""

    label: str
    text_NLE: Tensor
    """One prompt, or one per block; the last holds on where there are fewer than blocks."""
    initial_FCHW: Tensor | None = None
    """Latent frames given at the start (image to video)."""


def clip_requests(config: RunConfig, dataset: VideoDataset | LatentsDataset) -> Iterator[ClipRequest]:
    """One request per configured prompt; without any, one per sample for the first four samples.

    A sample's request takes its first prompt, and its first latent frame when the run is image to video. A
    sample is read when its request is taken, and only if something of it is needed.
    """
    prompts, given = config.evaluation.prompts, config.algorithm.i2v
    samples = min(_DEFAULT_CLIPS, len(dataset))
    encoder = build_text_encoder(config)
    for number in range(len(prompts) or samples):
        if prompts and not given:
            yield ClipRequest(label=prompts[number], text_NLE=encoder.encode([prompts[number]]))
            continue
        sample = dataset.sample(number % samples, epoch=0, frames=FrameRange(0, 1))
        yield ClipRequest(
            label=prompts[number] if prompts else f"sample {number}",
            text_NLE=encoder.encode([prompts[number]]) if prompts else sample.text_NLE[:1],
            initial_FCHW=sample.latents_FCHW if given else None,
        )


def make_clip(
    weights: Mapping[str, Tensor],
    config: RunConfig,
    request: ClipRequest,
    *,
    out: Path,
    seed: int,
    device: torch.device,
) -> Path:
    """Generate one clip with `weights` and write it to `out` (.gif or .mp4); returns that path.

    The noise depends on `seed` and the block alone. Pads nothing: the last block may be shorter.
    """
    model = CausalWan(model_config(config))
    model.load_state_dict(dict(weights), strict=True, assign=True)
    model.to(device).eval()
    evaluation = config.evaluation
    frames = evaluation.num_frames or config.image_or_video_shape[1]
    # Without causality the whole clip is one block, as in training.
    block = config.num_frame_per_block if config.algorithm.causal else frames
    channels, height, width = config.image_or_video_shape[2:]
    last = request.text_NLE.shape[0] - 1

    def noise(number: int) -> Tensor:
        own = FrameRange(number * block, min((number + 1) * block, frames))
        return block_normal(
            (channels, height, width),
            key=DrawKey(seed=seed, purpose="rollout"),
            frames=own,
            frame_per_block=block,
        )[None].to(device)

    latents = generate(
        model,
        text_BNLE=request.text_NLE[None].to(device),
        prompt_of_frame_BF=(torch.arange(frames) // config.num_frame_per_block).clamp(max=last)[None],
        frames=frames,
        frame_per_block=block,
        shape=(channels, height, width),
        schedule=build_flow_schedule(config),
        steps=evaluation.sampling_steps,
        noise=noise,
        guidance=evaluation.guidance_scale,
        negative_text_BNLE=build_text_encoder(config).encode([""])[None].to(device),
        window=attention_window(config),
        sink=config.model_kwargs.sink_size,
        initial_BFCHW=None if request.initial_FCHW is None else request.initial_FCHW[None].to(device),
    )
    frames_THWC = build_codec(config).decode(latents[0].float().cpu())
    write_clip(out, frames_THWC=frames_THWC.numpy(), fps=config.data.fps)
    return out
