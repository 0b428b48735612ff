"""What each rank runs for the tests of whole training runs."""

from __future__ import annotations

from pathlib import Path

import torch

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch
from evenspan.data.loader import MicroBatchLoader
from evenspan.testing import RankContext
from evenspan.train.loop import train

CHANNELS, HEIGHT, WIDTH, FRAMES = 12, 4, 4, 8
TEXT_LENGTH, TEXT_DIM = 4, 16


def run_config(data: Path, *, context: int, max_iters: int, tensor: int = 1, **training: object) -> RunConfig:
    """A nano model on precomputed latents in fp32, checkpoint every 10 steps; SP on a tensor axis."""
    return RunConfig.model_validate(
        {
            "model_kwargs": {
                "model_name": "wan-nano",
                "overrides": {"in_channels": CHANNELS, "out_channels": CHANNELS},
            },
            "sequence_parallel_size": context,
            "num_frame_per_block": 2,
            "parallel": {
                "mesh": {"tensor": tensor},
                "backend_kwargs": {"sequence_parallel": tensor > 1},
            },
            "image_or_video_shape": [1, FRAMES, CHANNELS, HEIGHT, WIDTH],
            "training": {
                "lr": 3e-3,
                "warmup_steps": 5,
                "max_iters": max_iters,
                "batch_size": 1,
                "gradient_accumulation_steps": 2,
                "ema_start_step": 2,
                **training,
            },
            "data": {"data_path": str(data), "kind": "latents", "text": {"length": TEXT_LENGTH}},
            "checkpoints": {"interval": 10, "max_checkpoints": 0},
            "logging": {"tensorboard": False},
        }
    )


def train_and_record(ctx: RankContext, config: RunConfig, logdir: Path) -> list[tuple[int, ...]]:
    """Train; return the sample ids this rank read, micro-batch by micro-batch."""
    del ctx
    seen: list[tuple[int, ...]] = []
    whole = MicroBatchLoader.batch

    def recording(self: MicroBatchLoader, step: int, *, micro: int = 0) -> VideoBatch:
        batch = whole(self, step, micro=micro)
        seen.append(batch.sample_ids)
        return batch

    MicroBatchLoader.batch = recording
    try:
        train(config, logdir=logdir, device=torch.device("cpu"))
    finally:
        MicroBatchLoader.batch = whole
    return seen
