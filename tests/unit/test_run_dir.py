"""A run directory belongs to one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenspan.config.schema import RunConfig
from evenspan.errors import RunError
from evenspan.train.run_dir import RunDir


def config(*, batch: int = 1, **training: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {"model_name": "wan-nano"},
            "image_or_video_shape": [batch, 8, 12, 4, 4],
            "num_frame_per_block": 2,
            "training": {"batch_size": batch, **training},
            "data": {"data_path": "somewhere"},
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
