"""The index of a folder of videos and captions, without opening a video.

    <root>/video/<sample>/<k>.mp4       k = 0, 1, ... in playing order (mp4, avi, mov, mkv, webm)
    <root>/caption/<sample>/<k>.json    {"caption": "..."}

Samples and videos are sorted, numbers as numbers, so every machine gives a sample the same id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenspan.errors import DataError, Finding

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFile:
    """One video of a sample and its caption."""

    path: Path
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFolder:
    """The videos of one sample in playing order."""

    name: str
    videos: tuple[VideoFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderIndex:
    """All samples; a sample's id is its place in `samples`."""

    root: Path
    samples: tuple[SampleFolder, ...]

    def __len__(self) -> int:
        return len(self.samples)


def index_folder(root: Path | str) -> FolderIndex:
    """The index of `root`. Raises one DataError that lists every problem, D101 to D107."""
    try:
        return _index(Path(root))
    except OSError as error:
        raise DataError(
            "D101",
            f"{error.filename} cannot be listed: {error.strerror}",
            hint="correct its permissions, or give another data.data_path",
        ) from error


def _index(root: Path) -> FolderIndex:
    videos = root / "video"
    if not videos.is_dir():
        missing = videos if root.is_dir() else root
        raise DataError(
            "D101",
            f"{missing} is not a directory",
            hint="data.data_path holds video/<sample>/<k>.mp4 and caption/<sample>/<k>.json; "
            "`evenspan data demo DIR` writes such a folder",
        )
    names = [entry for entry in videos.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        raise DataError(
            "D102",
            f"{videos} has no sample folders",
            hint="put each sample's videos in video/<sample>/<k>.mp4",
        )
    findings: list[Finding] = []
    samples = [
        _index_sample(folder, captions=root / "caption" / folder.name, findings=findings)
        for folder in sorted(names, key=natural_key)
    ]
    if findings:
        raise listed_problems(root, findings)
    return FolderIndex(root=root, samples=tuple(samples))


def natural_key(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Sorting key: 2 before 10, numbers before letters, then the whole name so that the order is total."""
    parts = re.findall(r"\d+|\D+", path.stem, flags=re.ASCII)
    return (
        *((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts),
        (2, 0, path.name),
    )


def _index_sample(folder: Path, *, captions: Path, findings: list[Finding]) -> SampleFolder:
    """The sample's videos that have a good caption; each problem is added to `findings`."""
    paths = [
        path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES and path.name[0] != "."
    ]
    if not paths:
        findings.append(
            Finding(
                code="D103",
                at=str(folder),
                fact="the sample has no video",
                hint=f"add <k> with one of {', '.join(sorted(VIDEO_SUFFIXES))}, or remove the folder",
            )
        )
    videos = []
    for path in sorted(paths, key=natural_key):
        caption = _read_caption(captions / f"{path.stem}.json", findings=findings)
        videos.append(VideoFile(path=path, caption=caption))
    return SampleFolder(name=folder.name, videos=tuple(videos))


def _read_caption(path: Path, *, findings: list[Finding]) -> str:
    """The caption in `path`, or "" and a finding."""
    problems = list(_caption_problems(path))
    findings.extend(problems)
    return "" if problems else json.loads(path.read_text(encoding="utf-8"))["caption"]


def _caption_problems(path: Path) -> Iterator[Finding]:
    at = str(path)
    hint = 'write {"caption": "what the video shows"}'
    if not path.is_file():
        yield Finding(code="D104", at=at, fact="the caption file is missing", hint=hint)
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        yield Finding(code="D105", at=at, fact=f"the caption file is not JSON: {error}", hint=hint)
        return
    except OSError as error:
        yield Finding(
            code="D105", at=at, fact=f"the caption file cannot be read: {error.strerror}", hint=hint
        )
        return
    if not isinstance(content, dict) or not _is_text(content.get("caption")):
        fact = f'the caption file has no text under "caption": {json.dumps(content)[:60]}'
        yield Finding(code="D106", at=at, fact=fact, hint=hint)
    elif not content["caption"].strip():
        yield Finding(code="D107", at=at, fact="the caption is empty", hint=hint)


def _is_text(value: object) -> bool:
    """Whether `value` is a string of whole characters; JSON can also spell halves of a pair."""
    return isinstance(value, str) and not any("\ud800" <= symbol <= "\udfff" for symbol in value)


def listed_problems(root: Path, findings: list[Finding]) -> DataError:
    """One error with the code of the first finding and a line for each."""
    count = len(findings)
    listed = "\n".join(f"{finding.code} {finding.at}: {finding.fact}" for finding in findings)
    hints = dict.fromkeys(finding.hint for finding in findings)
    return DataError(
        findings[0].code,
        f"{count} {'problem' if count == 1 else 'problems'} in {root}:\n{listed}",
        hint="; ".join(hints),
    )
