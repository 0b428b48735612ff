"""Metrics survive a crash, and what cannot be written is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenspan.errors import RunError
from evenspan.train.metrics import Reporter
from evenspan.train.run_dir import RunDir


def reporter(root: Path, *, start_step: int) -> Reporter:
    return Reporter(RunDir(root), total_steps=9, start_step=start_step, interval=1, tensorboard=False)


def test_torn_lines_and_steps_to_do_again_are_dropped(tmp_path: Path) -> None:
    good = '{"kind": "train", "step": 1}\n'
    bad = ['{"kind": "tr{"kind": "train", "step": 1}\n', "\u00e4\n", "[]\n", "{}\n", '{"step": "1"}\n']
    later = ['{"kind": "train", "step": 2}\n', '{"kind": "train", "st']
    (tmp_path / "metrics.jsonl").write_text("".join([good, *bad, good, *later]))
    with reporter(tmp_path, start_step=1):
        assert (tmp_path / "metrics.jsonl").read_text() == good + good


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"R107.*metrics in .* cannot be written: Is a directory"):
        reporter(tmp_path, start_step=0)
