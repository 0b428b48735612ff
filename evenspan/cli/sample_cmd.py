"""`evenspan sample`: a clip generated from a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory given to train --logdir")],
    out: Annotated[Path, typer.Option("--out", help="clip to write, .gif or .mp4")] = Path("clip.gif"),
) -> None:
    """Generate a clip block by block, as evaluation does."""
    from evenspan.train.sample import sample_run

    print(f"wrote {sample_run(run_dir, out=out)}")
