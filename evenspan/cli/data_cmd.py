"""`evenspan data`: data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Data sets.", no_args_is_help=True, rich_markup_mode=None)


@data_app.callback()
def data() -> None:
    """Data sets."""


@data_app.command()
def demo(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="directory to write; created when missing")
    ],
) -> None:
    """Write a small real data set: video/<sample>/<k>.mp4 with caption/<sample>/<k>.json."""
    from evenspan.data.demo import write_demo_dataset

    write_demo_dataset(directory)
    print(f"wrote {directory}")
