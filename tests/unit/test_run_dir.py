"""A run directory belongs to one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenspan.config.schema import RunConfig
from evenspan.errors import RunError
from evenspan.train.run_dir import RunDir


def config(*, batch: int = 1, sections: dict[str, object] | None = None, **training: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {"model_name": "wan-nano"},
            "image_or_video_shape": [batch, 8, 12, 4, 4],
            "num_frame_per_block": 2,
            "training": {"batch_size": batch, **training},
            "data": {"data_path": "somewhere"},
            **(sections or {}),
        }
    )


def test_claim_writes_the_configuration_once(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config(lr=1e-3))
    written = directory.config.read_bytes()
    directory.claim(config(lr=1e-3))
    assert directory.config.read_bytes() == written


def test_settings_that_only_spread_the_work_may_change(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config(max_iters=5, gradient_accumulation_steps=2))
    directory.claim(config(max_iters=9, gradient_accumulation_steps=1))
    directory.claim(config(max_iters=9, batch=2))


@pytest.mark.parametrize(
    "sections",
    [
        {"sequence_parallel_size": 2, "parallel": {"mesh": {"replicate": 2, "shard": 1}}},
        {"parallel": {"padding": "auto", "attention": "dense", "activation_checkpointing": "full"}},
        {"parallel": {"backend_kwargs": {"fsdp2": {"reshard_after_forward": False}}}},
        {"evaluation": {"interval": 3}, "checkpoints": {"interval": 3}},
        {"logging": {"interval": 3, "tensorboard": False}},
        {"data": {"data_path": "somewhere", "prefetch": 0}},
        {"training": {"fingerprint_interval": 7}},
    ],
)
def test_settings_that_do_not_bend_the_curve_may_change(tmp_path: Path, sections: dict[str, object]) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config())
    directory.claim(config(sections=sections))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"logging": {"seed": 1}}, "logging.seed=1"),
        ({"parallel": {"mixed_precision": "bf16"}}, "parallel.mixed_precision=bf16"),
        ({"data": {"data_path": "elsewhere"}}, "data.data_path=elsewhere"),
        ({"data": {"data_path": "somewhere", "random_start": False}}, "data.random_start=False"),
        ({"model_kwargs": {"model_name": "wan-tiny"}}, "model_kwargs.model_name=wan-tiny"),
        (
            {"model_kwargs": {"model_name": "wan-nano", "overrides": {"num_layers": 1}}},
            "model_kwargs.overrides.num_layers=1",
        ),
        ({"num_frame_per_block": 4}, "num_frame_per_block=4"),
        ({"algorithm": {"i2v": True}}, "algorithm.i2v=True"),
        ({"image_or_video_shape": [1, 16, 12, 4, 4]}, "image_or_video_shape="),
        ({"training": {"beta1": 0.5}}, "training.beta1=0.5"),
        ({"training": {"warmup_steps": 5}}, "training.warmup_steps=5"),
        ({"training": {"ema_weight": 0.5}}, "training.ema_weight=0.5"),
        ({"training": {"max_grad_norm": 0.5}}, "training.max_grad_norm=0.5"),
    ],
)
def test_settings_that_bend_the_curve_are_refused_by_name(
    tmp_path: Path, sections: dict[str, object], named: str
) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config())
    with pytest.raises(RunError) as refused:
        directory.claim(config(sections=sections))
    assert refused.value.code == "R101"
    assert f"+{named}" in refused.value.fact


def test_a_cosine_keeps_its_end(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config(max_iters=5, min_lr_ratio=0.1))
    with pytest.raises(RunError, match=r"R101.*\+training\.max_iters=9"):
        directory.claim(config(max_iters=9, min_lr_ratio=0.1))


def test_another_configuration_is_refused_with_its_differences(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.claim(config(lr=1e-3))
    before = directory.config.read_bytes()
    with pytest.raises(RunError, match=r"R101.*-training\.lr=0\.001; \+training\.lr=0\.5"):
        directory.claim(config(lr=0.5))
    assert directory.config.read_bytes() == before


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="R102"):
        RunDir(tmp_path).claim(config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["file", "file/below", "a" * 300])
def test_a_place_that_cannot_be_a_directory_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(RunError, match=r"R107.*cannot be a run directory"):
        RunDir(tmp_path / name).claim(config())
    assert (tmp_path / "file").read_text() == "years of work"


@pytest.mark.parametrize("text", ["[", "trainer: {lrr: 1}\n", ""])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="R102"):
        RunDir(tmp_path).claim(config())
    assert (tmp_path / "config.yaml").read_text() == text


def test_a_directory_in_use_is_refused_until_its_user_is_gone(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "run")
    first.claim(config())
    first.claim(config())
    with pytest.raises(RunError, match="R111"):
        RunDir(tmp_path / "run").claim(config())
    first.release()
    RunDir(tmp_path / "run").claim(config())
