"""How findings and results are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from evenspan.errors import ConfigError, Finding, RunError


class Format(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


def print_findings(findings: Sequence[Finding], *, output: Format) -> None:
    """Prints every finding to standard output, or that there is none."""
    if output is Format.JSON:
        result = {"findings": [asdict(finding) for finding in findings], "passed": not findings}
        print(json.dumps(result, indent=2))
    elif findings:
        print(ConfigError(findings))
    else:
        print("no findings")


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all. Raises RunError R107 when it cannot be written."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise RunError(
            "R107",
            f"{path} cannot be written: {error.strerror}",
            hint="name a file in a directory that exists and may be written",
        ) from None
