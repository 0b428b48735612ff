"""How findings and results are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from evenspan.errors import ConfigError, Finding


class Format(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


def print_findings(findings: Sequence[Finding], *, output: Format) -> None:
    """Prints every finding to standard output, or that there is none."""
    if output is Format.JSON:
        print_json({"findings": [asdict(finding) for finding in findings], "passed": not findings})
    elif findings:
        print(ConfigError(findings))
    else:
        print("no findings")


def print_json(value: Any) -> None:
    """Prints `value` as indented JSON."""
    print(json.dumps(value, indent=2))
