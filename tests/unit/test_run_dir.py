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
