"""The command line: parses, calls one function, and turns errors into messages and exit codes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import typer

from evenspan.cli.balance_cmd import balance
from evenspan.cli.check_cmd import check, explain
from evenspan.cli.data_cmd import data_app
from evenspan.cli.sample_cmd import sample
from evenspan.cli.train_cmd import train
from evenspan.config.environment import launch_env
from evenspan.errors import ConfigError, EvenspanError, Teller, TopologyError

INTERRUPTED = 130
HEAD_START_S = 1.0
"""How long a rank stays after an error that another one tells, or that it tells for others. Launchers stop
every rank as soon as one fails, and the one that tells may be slower; the others ask it who tells."""

app = typer.Typer(
    name="evenspan",
    help="Sequence-parallel training whose arithmetic is exactly that of one process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in help are text, and output is the same on every terminal
)
app.command()(train)
app.command()(check)
app.command()(explain)
app.command()(balance)
app.command()(sample)
app.add_typer(data_app, name="data")


def main(arguments: Sequence[str] | None = None, *, command: str | None = None) -> int:
    """Runs `command *arguments` (default: the process arguments) and returns the exit code.

    0 clean, 1 findings or a failed run, 2 usage or configuration, 130 interrupted. An error that is not the
    user's stays a traceback.
    """
    given = sys.argv[1:] if arguments is None else arguments
    line = [*([command] if command else []), *given]
    try:
        typer.main.get_command(app).main(args=line, prog_name="evenspan")
    except EvenspanError as error:
        speaks = _speaks(error)
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        if not speaks or error.told_by is Teller.THIS_RANK:
            time.sleep(HEAD_START_S)
        return error.exit_code
    except KeyboardInterrupt:
        if _is_main_rank():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def _speaks(error: EvenspanError) -> bool:
    """Whether this rank prints `error`. Every rank finds the same configuration errors: rank 0 tells them."""
    if isinstance(error, ConfigError):
        return _is_main_rank()
    return error.told_by is not Teller.OTHER_RANK


def _is_main_rank() -> bool:
    try:
        return launch_env().is_main
    except TopologyError:
        return True  # nobody can tell who is rank 0, so nobody stays silent


if __name__ == "__main__":
    sys.exit(main())
