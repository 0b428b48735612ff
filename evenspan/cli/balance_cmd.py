"""`evenspan balance`: who does how much work, computed without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from evenspan.check.rules import check_file
from evenspan.cli.check_cmd import MOST_RANKS, FileArgument, FormatOption, OverridesArgument
from evenspan.cli.output import Format, write_text
from evenspan.config.tasks import video_config


def balance(
    file: FileArgument,
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, max=MOST_RANKS, help="ranks that will run it")
    ],
    overrides: OverridesArgument = None,
    output: FormatOption = Format.TEXT,
    out: Annotated[Path | None, typer.Option("--out", help="write to this file, .txt or .json")] = None,
) -> None:
    """Show frames, tokens, loss tokens, attention pairs and exchanged bytes of every rank."""
    if out is not None and out.suffix not in (".txt", ".json"):
        raise typer.BadParameter(f"{out} must end in .txt or .json", param_hint="--out")
    result = check_file(file, overrides=overrides or [], world_size=world_size, check_paths=False)
    config = video_config(result.legal_config(), command="balance")

    from evenspan.planner.balance import balance_report

    report = balance_report(config, world_size)
    as_json = output is Format.JSON or (out is not None and out.suffix == ".json")
    text = json.dumps(report.as_json(), indent=2) if as_json else report.as_text()
    if out is None:
        print(text)
    else:
        write_text(out, f"{text}\n")
        print(f"wrote {out}")
