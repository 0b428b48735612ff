"""`evenspan check` and `evenspan explain`: findings and their pages, without starting a process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenspan.check.explain import explain as page_of
from evenspan.check.rules import check_file
from evenspan.cli.output import Format, print_findings
from evenspan.errors import ConfigError

MOST_RANKS = 2**20
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="configuration, .yaml or literal .py")]
WorldOption = Annotated[
    int | None, typer.Option("--world-size", min=1, max=MOST_RANKS, help="ranks that will run it")
]
FormatOption = Annotated[Format, typer.Option("--format", help="text or json")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings that replace the file's")
]

UNREADABLE = ("C005", "C006", "C007")


def check(
    file: FileArgument,
    overrides: OverridesArgument = None,
    world_size: WorldOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List every configuration error. Exit code 0: none, 1: findings, 2: nothing readable to check."""
    result = check_file(file, overrides=overrides or [], world_size=world_size)
    print_findings(result.findings, output=output)
    if any(finding.code in UNREADABLE for finding in result.findings):
        raise typer.Exit(ConfigError.exit_code)
    if not result.passed:
        raise typer.Exit(1)


def explain(code: Annotated[str, typer.Argument(metavar="CODE", help="for example S201")]) -> None:
    """Print the page of a code: what it checks, why, a bad example, and what to write instead."""
    print(page_of(code))
