"""`evenspan balance`: who does how much work, computed without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenspan.check.rules import check_file
from evenspan.cli.check_cmd import FileArgument, FormatOption, OverridesArgument
from evenspan.cli.output import Format, print_json


def balance(
    file: FileArgument,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="ranks that will run it")],
    overrides: OverridesArgument = None,
    output: FormatOption = Format.TEXT,
    out: Annotated[Path | None, typer.Option("--out", help="write to this file instead")] = None,
) -> None:
    """Show frames, tokens, loss tokens, attention pairs and exchanged bytes of every rank."""
    config = check_file(
        file, overrides=overrides or [], world_size=world_size, check_paths=False
    ).legal_config()

    from evenspan.planner.balance import balance_report

    report = balance_report(config, world_size)
    if output is Format.JSON and out is None:
        print_json(report.as_json())
        return
    text = _as_text(report.as_json()) if output is Format.TEXT else ""
    print(text)
