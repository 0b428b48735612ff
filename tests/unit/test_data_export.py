"""Clips written can be read back, and a failed write leaves nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenspan.data.decode import VideoReader
from evenspan.data.export import write_clip
from evenspan.errors import DataError


def smooth_clip(frames: int = 6, height: int = 32, width: int = 48) -> np.ndarray:
    at = np.arange(frames)[:, None, None, None] * 10
    ramp = np.arange(height)[:, None, None] * 2 + np.arange(width)[None, :, None] * np.array([3, 1, 2])
    return ((at + ramp) % 256).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("suffix", [".gif", ".mp4", ".GIF"])
def test_a_clip_reads_back(tmp_path: Path, suffix: str) -> None:
    clip = smooth_clip()
    path = tmp_path / "new" / f"clip{suffix}"
    write_clip(path, frames_THWC=clip, fps=10)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    reader = VideoReader(height=32, width=48)
    info = reader.info(path)
    assert (info.frames, float(info.fps)) == (6, 10.0)
    back = reader.read(path, frames=range(6))
    assert np.abs(back.astype(int) - clip).mean() < 12


def test_odd_sides(tmp_path: Path) -> None:
    write_clip(tmp_path / "odd.mp4", frames_THWC=smooth_clip(2, 33, 47), fps=24)
    write_clip(tmp_path / "odd.gif", frames_THWC=smooth_clip(1, 33, 47), fps=24)
    assert VideoReader(height=32, width=46).read(tmp_path / "odd.mp4", frames=[1]).shape == (1, 32, 46, 3)


def test_what_is_no_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="D705"):
        write_clip(tmp_path / "clip.txt", frames_THWC=smooth_clip(), fps=10)
    for wrong in (smooth_clip().astype(float), smooth_clip()[0], smooth_clip()[:0], smooth_clip()[..., :2]):
        with pytest.raises(DataError, match="D706"):
            write_clip(tmp_path / "clip.gif", frames_THWC=wrong, fps=10)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(path, frames_THWC=smooth_clip(), fps=10)
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        (tmp_path / ".clip.part.mp4").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evenspan.data.export._even_sides", full_disk)
    with pytest.raises(DataError, match=r"D706.*clip\.mp4"):
        write_clip(path, frames_THWC=smooth_clip(2), fps=10)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["clip.mp4"]
