"""Whole runs: the same curve at any degree, and across a stop and a resume at another degree."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenspan.data.latents_dataset import write_latents
from evenspan.testing import RankPool
from evenspan.train.checkpoint import list_checkpoints
from tests.distributed.cases_training import (
    CHANNELS,
    FRAMES,
    HEIGHT,
    TEXT_DIM,
    TEXT_LENGTH,
    WIDTH,
    run_config,
    train_and_record,
)

STEPS = 50
SAMPLES = 10
CURVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def world1() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("latents")
    generator = torch.Generator().manual_seed(1)
    for sample in range(SAMPLES):
        write_latents(
            directory / f"{sample}.safetensors",
            latents_FCHW=torch.randn(FRAMES, CHANNELS, HEIGHT, WIDTH, generator=generator),
            text_NLE=torch.randn(2, TEXT_LENGTH, TEXT_DIM, generator=generator),
            prompt_of_frame_F=torch.arange(FRAMES) // 4,
        )
    return directory


@pytest.fixture(scope="module")
def one_process(world1: RankPool, latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logdir = tmp_path_factory.mktemp("runs") / "one"
    world1.run(train_and_record, run_config(latents, context=1, max_iters=STEPS), logdir, timeout=300)
    return logdir


def curve(logdir: Path) -> list[float]:
    lines = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def assert_same_curve(got: list[float], want: list[float]) -> None:
    assert len(got) == len(want) == STEPS
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst <= CURVE_TOLERANCE, worst


def test_curve_of_two_context_ranks(
    world2: RankPool, latents: Path, one_process: Path, tmp_path: Path
) -> None:
    world2.run(
        train_and_record, run_config(latents, context=2, max_iters=STEPS), tmp_path / "run", timeout=300
    )
    assert_same_curve(curve(tmp_path / "run"), curve(one_process))


def test_curve_of_four_context_ranks(
    world4: RankPool, latents: Path, one_process: Path, tmp_path: Path
) -> None:
    world4.run(
        train_and_record, run_config(latents, context=4, max_iters=STEPS), tmp_path / "run", timeout=400
    )
    assert_same_curve(curve(tmp_path / "run"), curve(one_process))


def test_resume_at_other_degrees_continues_the_curve(
    world2: RankPool, world4: RankPool, latents: Path, one_process: Path, tmp_path: Path
) -> None:
    """20 steps of one process, 10 of dp2 x P2, 10 of P2, 10 of P4."""
    logdir = tmp_path / "run"
    shutil.copytree(one_process, logdir)
    for checkpoint in list_checkpoints(logdir / "checkpoints")[2:]:
        shutil.rmtree(checkpoint)
    accumulate_1 = {"gradient_accumulation_steps": 1}
    config = run_config(latents, context=2, max_iters=STEPS, **accumulate_1)
    seen = [ids for rank in world4.run(train_and_record, config, logdir, timeout=400)[::2] for ids in rank]
    assert_same_curve(curve(logdir), curve(one_process))
    assert len(seen) == 2 * (STEPS - 20)

    for checkpoint in list_checkpoints(logdir / "checkpoints")[3:]:
        shutil.rmtree(checkpoint)
    config = run_config(latents, context=2, max_iters=STEPS)
    world2.run(train_and_record, config, logdir, timeout=400)
    assert_same_curve(curve(logdir), curve(one_process))

    for checkpoint in list_checkpoints(logdir / "checkpoints")[4:]:
        shutil.rmtree(checkpoint)
    config = run_config(latents, context=4, max_iters=STEPS)
    world4.run(train_and_record, config, logdir, timeout=400)
    assert_same_curve(curve(logdir), curve(one_process))


def test_curve_and_resume_with_a_tensor_axis(
    world2: RankPool, world4: RankPool, latents: Path, one_process: Path, tmp_path: Path
) -> None:
    """20 steps of context 2 x tensor 2, 10 of shard 2 x tensor 2, 10 of tensor 2, 10 of context 2."""
    logdir = tmp_path / "run"
    accumulate_1 = {"gradient_accumulation_steps": 1}
    stages = [
        (world4, run_config(latents, context=2, tensor=2, max_iters=STEPS)),
        (world4, run_config(latents, context=1, tensor=2, max_iters=STEPS, **accumulate_1)),
        (world2, run_config(latents, context=1, tensor=2, max_iters=STEPS)),
        (world2, run_config(latents, context=2, max_iters=STEPS)),
    ]
    for number, (pool, config) in enumerate(stages):
        for checkpoint in list_checkpoints(logdir / "checkpoints")[1 + number :]:
            shutil.rmtree(checkpoint)
        pool.run(train_and_record, config, logdir, timeout=400)
        assert_same_curve(curve(logdir), curve(one_process))


def test_every_sample_is_seen_once_an_epoch_across_a_resume(
    world1: RankPool, world4: RankPool, latents: Path, tmp_path: Path
) -> None:
    """Two epochs of ten samples: 10 steps of 2 samples; the first 5 steps at dp1, the others at dp2 x P2."""
    logdir = tmp_path / "run"
    checkpoints = {"ema_start_step": 0}
    first = run_config(latents, context=1, max_iters=5, **checkpoints)
    seen = [ids for rank in world1.run(train_and_record, first, logdir, timeout=200) for ids in rank]
    second = run_config(latents, context=2, max_iters=10, gradient_accumulation_steps=1, **checkpoints)
    ranks = world4.run(train_and_record, second, logdir, timeout=200)
    assert ranks[0] == ranks[1], "ranks of one context group read the same samples"
    assert ranks[2] == ranks[3]
    seen += [ids for rank in (ranks[0], ranks[2]) for ids in rank]
    counts = Counter(sample for ids in seen for sample in ids)
    assert counts == dict.fromkeys(range(SAMPLES), 2)
