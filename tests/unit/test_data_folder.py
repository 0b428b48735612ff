"""The index of a folder is sorted, and its problems are all told at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenspan.data.folder import index_folder
from evenspan.errors import DataError


def add(
    root: Path, sample: str, video: str = "0.mp4", *, caption: str | None = '{"caption": "a bird"}'
) -> None:
    (root / "video" / sample).mkdir(parents=True, exist_ok=True)
    (root / "caption" / sample).mkdir(parents=True, exist_ok=True)
    (root / "video" / sample / video).write_bytes(b"")
    if caption is not None:
        (root / "caption" / sample / f"{Path(video).stem}.json").write_text(caption)


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for sample in ("10", "9", "b2", "b10", "a"):
        add(tmp_path, sample)
    for video in ("10.mp4", "2.MOV", "x.webm"):
        add(tmp_path, "9", video, caption=json.dumps({"caption": video}))
    (tmp_path / "video" / "9" / ".3.mp4").write_bytes(b"")
    (tmp_path / "video" / "9" / "notes.txt").write_bytes(b"")
    (tmp_path / "video" / "stray.mp4").write_bytes(b"")
    index = index_folder(tmp_path)
    assert [sample.name for sample in index.samples] == ["9", "10", "a", "b2", "b10"]
    assert [video.path.name for video in index.samples[0].videos] == ["0.mp4", "2.MOV", "10.mp4", "x.webm"]
    assert index.samples[0].videos[1].caption == "2.MOV"
    assert len(index) == 5


@pytest.mark.parametrize(
    ("caption", "code"),
    [
        (None, "D104"),
        ("not json", "D105"),
        ('["a"]', "D106"),
        ('{"text": "a"}', "D106"),
        ('{"caption": 3}', "D106"),
        ('{"caption": " "}', "D107"),
        ('{"caption": "half a pair \\ud800"}', "D106"),
        ("[" * 100_000, "D105"),
        ("9" * 5000, "D105"),
    ],
)
def test_bad_captions_are_named(tmp_path: Path, caption: str | None, code: str) -> None:
    add(tmp_path, "one", caption=caption)
    with pytest.raises(DataError, match=rf"{code}.*(?s:.)*caption/one/0\.json") as caught:
        index_folder(tmp_path)
    assert caught.value.code == code


def test_a_caption_that_is_not_text_is_not_json(tmp_path: Path) -> None:
    add(tmp_path, "one")
    (tmp_path / "caption" / "one" / "0.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="D105"):
        index_folder(tmp_path)


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, "one")

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=r"D101.*video cannot be listed: Permission denied"):
        index_folder(tmp_path)


def test_a_caption_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, "one")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataError, match=r"D105(?s:.)*0\.json: the caption file cannot be read: Permission"):
        index_folder(tmp_path)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    add(tmp_path, "1", caption=None)
    add(tmp_path, "2", caption='{"caption": ""}')
    (tmp_path / "video" / "3").mkdir()
    add(tmp_path, "4")
    with pytest.raises(DataError, match="3 problems") as caught:
        index_folder(tmp_path)
    for expected in ("D104", "D107", "D103", "caption/1/0.json", "caption/2/0.json", "video/3"):
        assert expected in str(caught.value)
    assert "4/0" not in str(caught.value)


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"D101.*nowhere"):
        index_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"D101.*video"):
        index_folder(tmp_path)
    (tmp_path / "video").mkdir()
    with pytest.raises(DataError, match="D102"):
        index_folder(tmp_path)
