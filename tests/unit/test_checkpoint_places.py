"""Whatever moment a crash picks, a whole checkpoint is there, and the next start finds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evenspan.train import checkpoint
from evenspan.train.checkpoint import list_checkpoints, read_progress, recover


def write(path: Path, *, samples: int) -> Path:
    """A directory that looks like a checkpoint; `samples` tells two of them apart."""
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"step": 3, "samples": samples}))
    (path / "shard.distcp").write_text("numbers")
    return path


def newest(directory: Path) -> int:
    return read_progress(list_checkpoints(directory)[-1]).samples


class CrashError(Exception):
    """The end of the process, at a place of our choice."""


@pytest.mark.parametrize("crash_at", range(4))
def test_a_crash_while_one_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    final = write(tmp_path / "step_00000003", samples=1)
    partial = write(tmp_path / ".partial_step_00000003", samples=2)
    calls = 0
    rename, rmtree = Path.rename, shutil.rmtree

    def count() -> None:
        nonlocal calls
        if calls == crash_at:
            raise CrashError
        calls += 1
        assert list_checkpoints(tmp_path)

    def counted_rename(path: Path, target: Path) -> Path:
        count()
        return rename(path, target)

    def counted_rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        count()
        (path / "state.json").unlink()
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(Path, "rename", counted_rename)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", counted_rmtree)
    crashed = False
    try:
        checkpoint._put_in_place(partial, final)
    except CrashError:
        crashed = True
    monkeypatch.undo()
    assert crashed == (crash_at < 3)
    expected = 2 if crash_at >= 2 else 1
    assert newest(tmp_path) == expected
    recover(tmp_path)
    assert newest(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_a_half_deleted_checkpoint_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(tmp_path / "step_00000002", samples=1)
    write(tmp_path / "step_00000003", samples=2)

    def torn(path: Path, *, ignore_errors: bool = False) -> None:
        del ignore_errors
        (path / "shard.distcp").unlink()
        raise CrashError

    monkeypatch.setattr(checkpoint.shutil, "rmtree", torn)
    with pytest.raises(CrashError):
        checkpoint._drop(old)
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000003"]
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_recover_without_a_directory_does_nothing(tmp_path: Path) -> None:
    recover(tmp_path / "none")
    assert not list(tmp_path.iterdir())
