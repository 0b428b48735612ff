"""`evenspan sample`: a clip from a run's newest checkpoint, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from evenspan.check.rules import check_config
from evenspan.config.load import load_config
from evenspan.config.schema import RunConfig
from evenspan.config.tasks import video_config
from evenspan.errors import CheckpointError, ConfigError, RunError
from evenspan.model.wan import CausalWan
from evenspan.train.build import build_text_encoder, model_config, open_dataset
from evenspan.train.checkpoint import list_checkpoints, load_average, load_weights
from evenspan.train.clips import ClipRequest, clip_requests, make_clip
from evenspan.train.run_dir import RunDir

_SUFFIXES = (".gif", ".mp4")


def sample_run(
    run_dir: Path,
    *,
    out: Path,
    prompts: Sequence[str] = (),
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Generate a clip from the newest checkpoint in `run_dir` and write it to `out` (.gif or .mp4).

    `prompts` holds one prompt, or one per block; without any, the first clip that evaluation would make.
    Raises RunError R105 for a file type that cannot be written, R106 for a directory that is no run, R108 for
    an override outside `evaluation`, ConfigError for one that is not legal, and CheckpointError K103 when the
    run holds no complete checkpoint.
    """
    if out.suffix not in _SUFFIXES:
        raise RunError(
            "R105", f"--out {out} ends in {out.suffix!r}", hint=f"use one of {', '.join(_SUFFIXES)}"
        )
    directory = RunDir(run_dir)
    if not directory.config.is_file():
        raise RunError(
            "R106", f"{run_dir} is no run: it has no config.yaml", hint="name the --logdir of a training run"
        )
    config = _config(directory, overrides)
    found = list_checkpoints(directory.checkpoints)
    if not found:
        raise CheckpointError(
            "K103",
            f"{directory.checkpoints} holds no complete checkpoint",
            hint="train the run to its first save",
        )
    return make_clip(
        _read_weights(found[-1], config),
        config,
        _request(config, prompts),
        out=out,
        seed=config.logging.seed if seed is None else seed,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )


def _config(directory: RunDir, overrides: Sequence[str]) -> RunConfig:
    trained = video_config(load_config(directory.config), command="sample")
    config = video_config(load_config(directory.config, overrides=overrides), command="sample")
    if config != trained.model_copy(update={"evaluation": config.evaluation}):
        raise RunError(
            "R108",
            f"{' '.join(overrides)} changes more than how {directory.root} is evaluated",
            hint="override only settings of `evaluation`; the weights fit the rest",
        )
    if findings := check_config(config, world_size=None, check_paths=False):
        raise ConfigError(findings)
    return config


def _request(config: RunConfig, prompts: Sequence[str]) -> ClipRequest:
    if prompts and not config.algorithm.i2v:
        return ClipRequest(label=prompts[0], text_NLE=build_text_encoder(config).encode(list(prompts)))
    request = next(clip_requests(config, open_dataset(config)))
    if prompts:
        return replace(request, text_NLE=build_text_encoder(config).encode(list(prompts)))
    return request


def _read_weights(checkpoint: Path, config: RunConfig) -> dict[str, Tensor]:
    model = CausalWan(model_config(config))
    weights = {
        name: torch.empty_like(value, dtype=torch.float32) for name, value in model.state_dict().items()
    }
    if config.evaluation.use_ema:
        load_average(checkpoint, weights)
    else:
        load_weights(checkpoint, weights)
    return weights
