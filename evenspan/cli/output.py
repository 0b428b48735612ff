"""How findings and results are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum

from evenspan.errors import ConfigError, Finding


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
