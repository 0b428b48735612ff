"""Faults during a run: a named error on every rank, and the last good checkpoint intact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenspan.data.latents_dataset import write_latents
from evenspan.testing import RankPool
from evenspan.train.checkpoint import list_checkpoints
from tests.distributed.cases_faults import error_of_training, error_with_other_data, error_with_small_files
from tests.distributed.cases_training import (
    CHANNELS,
    FRAMES,
    HEIGHT,
    TEXT_DIM,
    TEXT_LENGTH,
    WIDTH,
    run_config,
)


@pytest.fixture
def latents(tmp_path: Path) -> Path:
    directory = tmp_path / "latents"
    directory.mkdir()
    for sample in range(2):
        write_latents(
            directory / f"{sample}.safetensors",
            latents_FCHW=torch.randn(FRAMES, CHANNELS, HEIGHT, WIDTH),
            text_NLE=torch.randn(1, TEXT_LENGTH, TEXT_DIM),
            prompt_of_frame_F=torch.zeros(FRAMES, dtype=torch.long),
        )
    return directory


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_keeps_the_last_checkpoint(
    world2: RankPool, latents: Path, tmp_path: Path, rank: int
) -> None:
    logdir = tmp_path / "run"
    assert world2.run(error_of_training, run_config(latents, context=2, max_iters=2), logdir) == ["", ""]
    before = list_checkpoints(logdir / "checkpoints")
    errors = world2.run(
        error_with_small_files, run_config(latents, context=2, max_iters=4), logdir, rank, 20_000
    )
    assert all(error.startswith("K101") for error in errors), errors
    assert all(f"rank {rank}" in error for error in errors), errors
    assert sorted((logdir / "checkpoints").iterdir()) == before
    assert world2.run(error_of_training, run_config(latents, context=2, max_iters=4), logdir) == ["", ""]


def test_a_nan_sample_stops_every_rank_before_the_update(
    world2: RankPool, latents: Path, tmp_path: Path
) -> None:
    path = latents / "1.safetensors"
    tensors = load_file(path)
    tensors["latents"] = tensors["latents"].clone()
    tensors["latents"][1] = float("nan")
    save_file(tensors, path)
    logdir = tmp_path / "run"
    errors = world2.run(error_of_training, run_config(latents, context=2, max_iters=3), logdir)
    assert all(error.startswith("R103") and "nan" in error for error in errors), errors
    assert not list_checkpoints(logdir / "checkpoints")


def test_a_torn_checkpoint_is_named(world2: RankPool, latents: Path, tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    world2.run(error_of_training, run_config(latents, context=2, max_iters=2), logdir)
    shard = max(
        list_checkpoints(logdir / "checkpoints")[-1].glob("*.distcp"), key=lambda path: path.stat().st_size
    )
    shard.write_bytes(shard.read_bytes()[:100])
    errors = world2.run(error_of_training, run_config(latents, context=2, max_iters=4), logdir)
    assert all(error.startswith("K102") for error in errors), errors


def test_a_fresh_start_over_checkpoints_is_refused(world2: RankPool, latents: Path, tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    config = run_config(latents, context=2, max_iters=1)
    world2.run(error_of_training, config, logdir)
    before = list_checkpoints(logdir / "checkpoints")
    fresh = config.checkpoints.model_copy(update={"auto_resume": False})
    errors = world2.run(error_of_training, config.model_copy(update={"checkpoints": fresh}), logdir)
    assert all(error.startswith("R109") for error in errors), errors
    assert list_checkpoints(logdir / "checkpoints") == before


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"step": null, "samples": 4}'])
def test_a_checkpoint_without_its_progress_is_named(
    world2: RankPool, latents: Path, tmp_path: Path, state: str
) -> None:
    logdir = tmp_path / "run"
    world2.run(error_of_training, run_config(latents, context=2, max_iters=1), logdir)
    (list_checkpoints(logdir / "checkpoints")[-1] / "state.json").write_text(state)
    errors = world2.run(error_of_training, run_config(latents, context=2, max_iters=2), logdir)
    assert all(error.startswith("K102") for error in errors), errors


def test_a_run_directory_that_is_a_file_is_refused_on_every_rank(
    world2: RankPool, latents: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("notes")
    errors = world2.run(error_of_training, run_config(latents, context=2, max_iters=1), tmp_path / "run")
    assert all(error.startswith("R107") for error in errors), errors
    assert (tmp_path / "run").read_text() == "notes"


def test_another_run_is_refused_on_every_rank(world2: RankPool, latents: Path, tmp_path: Path) -> None:
    logdir = tmp_path / "run"
    world2.run(error_of_training, run_config(latents, context=2, max_iters=1), logdir)
    errors = world2.run(error_of_training, run_config(latents, context=2, max_iters=1, lr=0.7), logdir)
    assert all(error.startswith("R101") for error in errors), errors


def test_another_global_batch_is_refused_on_every_rank(
    world2: RankPool, latents: Path, tmp_path: Path
) -> None:
    logdir = tmp_path / "run"
    world2.run(error_of_training, run_config(latents, context=2, max_iters=1), logdir)
    errors = world2.run(error_of_training, run_config(latents, context=1, max_iters=2), logdir)
    assert all(error.startswith("R110") and "took 2 samples" in error for error in errors), errors
    fitting = run_config(latents, context=1, max_iters=2, gradient_accumulation_steps=1)
    assert world2.run(error_of_training, fitting, logdir) == ["", ""]


def test_the_first_step_of_every_start_compares_content(
    world2: RankPool, latents: Path, tmp_path: Path
) -> None:
    logdir = tmp_path / "run"
    world2.run(error_of_training, run_config(latents, context=2, max_iters=1), logdir)
    other = tmp_path / "other"
    shutil.copytree(latents, other)
    (other / "0.safetensors").rename(other / "2.safetensors")
    errors = world2.run(error_with_other_data, run_config(latents, context=2, max_iters=2), other, logdir)
    assert all(error.startswith("X201") for error in errors), errors
