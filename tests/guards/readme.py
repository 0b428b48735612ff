"""Shell blocks of a Markdown page: what to run, what to expect, what is not run and why.

A block is fenced as `console`; lines after `$ ` are commands, the others are output. A comment in the line
above says what to do with it: `<!-- run: -->` runs it, `exit N` expects that exit code, `output` compares
the output, `skip, REASON` runs nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from tests.guards.source import ROOT

FENCE = re.compile(
    r"(?:^<!-- run:(?P<rule>.*?)-->\n)?^```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
BUILT = {".git", ".venv", "runs", "data", "build", ".hypothesis"}
"""Folders of the repository's root that are not part of it."""
SHIM = """#!/bin/sh
exec "{python}" -c 'import sys; from evenspan.cli.app import main; sys.exit(main())' "$@"
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `skip` is the reason why it is not run, or ""."""

    commands: tuple[str, ...]
    output: str
    exit_code: int = 0
    compare: bool = False
    skip: str = ""
    marked: bool = True

    @property
    def name(self) -> str:
        """The commands in one line."""
        return " && ".join(self.commands)


def shell_blocks(text: str) -> list[Block]:
    """Every console block of a page, in order."""
    return [_block(match["rule"], match["body"]) for match in FENCE.finditer(text)]


def _block(rule: str | None, body: str) -> Block:
    lines = body.splitlines()
    commands = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    output = "\n".join(line for line in lines if not line.startswith("$ "))
    wanted = (rule or "").strip()
    if wanted.startswith("skip"):
        return Block(commands, output, skip=wanted.partition(",")[2].strip())
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    known = [word for word in words if word == "output" or re.fullmatch(r"exit \d", word)]
    assert words == known, f"unknown instruction in {wanted!r}"
    codes = [int(word.removeprefix("exit ")) for word in words if word != "output"]
    return Block(commands, output, *codes, compare="output" in words, marked=rule is not None)


def copy_of_tree(target: Path) -> Path:
    """A copy of the repository without what it builds, with an `evenspan` command that runs the copy."""
    tree = target / "tree"
    caches = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")

    def left_out(folder: str, names: list[str]) -> set[str]:
        built = BUILT.intersection(names) if Path(folder) == ROOT else set()
        return built | caches(folder, names)

    shutil.copytree(ROOT, tree, ignore=left_out)
    command = target / "bin" / "evenspan"
    command.parent.mkdir()
    command.write_text(SHIM.format(python=sys.executable))
    command.chmod(0o755)
    return tree


def prepared_tree(target: Path) -> Path:
    """A copy of the repository with two small samples in `data/demo`, where real clips would be."""
    tree = copy_of_tree(target)
    for number in range(2):
        write_sample(tree / "data" / "demo", name=f"sample{number}", shade=60 + 80 * number)
    return tree


def write_sample(directory: Path, *, name: str, shade: int, frames: int = 144) -> None:
    """One video of a moving bar with its caption, in the folder layout of the data sets."""
    video, caption = directory / "video" / name, directory / "caption" / name
    video.mkdir(parents=True)
    caption.mkdir(parents=True)
    (caption / "0.json").write_text('{"caption": "A bar moves to the right."}')
    with av.open(str(video / "0.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for index in range(frames):
            image = np.full((96, 128, 3), shade, dtype=np.uint8)
            image[:, index % 112 : index % 112 + 16] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def run_block(block: Block, *, tree: Path, timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a block's commands in a tree made by `copy_of_tree`."""
    script = "\n".join(
        [
            "set -e",
            f'export PATH="{tree.parent}/bin:{Path(sys.executable).parent}:$PATH"',
            f'export PYTHONPATH="{tree}" OMP_NUM_THREADS=1 COLUMNS=120 NO_COLOR=1 TERM=dumb',
            *block.commands,
        ]
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout


def same_output(wanted: str, got: str) -> bool:
    """Whether two outputs agree in everything but trailing blanks."""
    return _stripped(wanted) == _stripped(got)


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def with_outputs(text: str, *, tree: Path, timeout_s: float) -> str:
    """The page with the output of every compared block replaced by what its commands print now."""

    def replaced(match: re.Match[str]) -> str:
        block = _block(match["rule"], match["body"])
        if not block.compare:
            return match[0]
        code, output = run_block(block, tree=tree, timeout_s=timeout_s)
        assert code == block.exit_code, f"{block.name} exits with {code}:\n{output}"
        commands = "".join(f"$ {command}\n" for command in block.commands)
        body = "\n".join(_stripped(output))
        return f"<!-- run:{match['rule']}-->\n```console\n{commands}{body}\n```"

    return FENCE.sub(replaced, text)
