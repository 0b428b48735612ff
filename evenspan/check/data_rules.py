"""Rules about the data set on disk, as far as a directory listing can tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenspan.check.registry import Broken, Run, rule

AT = "data.data_path"


@rule("D401", "data-exists", reads=(AT,), task="video")
def data_exists(run: Run) -> Iterator[Broken]:
    """A path that is not there is found now, not after the model was built."""
    path = Path(run.video.data.data_path)
    if run.check_paths and not _is_dir(path):
        what = _what_is_there(path)
        parent = _nearest_parent(path.absolute())
        hint = (
            f"give a directory with video/ and caption/ ({parent} exists), "
            f"or write one: evenspan data demo {run.video.data.data_path}"
        )
        yield Broken(at=AT, fact=f"{str(path)!r} {what}", hint=hint)


def _what_is_there(path: Path) -> str:
    try:
        return "is a file" if path.exists() else "does not exist"
    except OSError as error:  # a name too long, a folder that may not be entered
        return f"cannot be looked up: {error.strerror}"


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _nearest_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if _is_dir(parent))


@rule("D402", "data-has-samples", reads=(AT, "data.kind"), task="video")
def data_has_samples(run: Run) -> Iterator[Broken]:
    """An empty folder, or one laid out otherwise, gives no sample to train on."""
    path = Path(run.video.data.data_path)
    if not run.check_paths or not _is_dir(path):
        return  # D401 has said so
    if run.video.data.kind == "latents":
        if next(path.glob("*.safetensors"), None) is None:
            yield Broken(
                at=AT, fact=f"{str(path)!r} holds no .safetensors file", hint="or set data.kind: video"
            )
        return
    try:
        empty = [str(path / folder) for folder in ("video", "caption") if not _has_folder(path / folder)]
    except PermissionError as error:
        yield Broken(at=AT, fact=f"{error.filename!r} may not be read", hint="correct its permissions")
        return
    if empty:
        hint = "lay samples out as video/<sample>/<k>.mp4 and caption/<sample>/<k>.json"
        yield Broken(at=AT, fact=f"{' and '.join(empty)}: no sample folder there", hint=hint)


def _has_folder(path: Path) -> bool:
    return path.is_dir() and any(child.is_dir() for child in path.iterdir())
