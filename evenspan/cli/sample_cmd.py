"""`evenspan sample`: a clip generated from a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="evaluation settings that replace the run's"),
]


def sample(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory given to train --logdir")],
    overrides: OverridesArgument = None,
    out: Annotated[Path, typer.Option("--out", help="clip to write, .gif or .mp4")] = Path("clip.gif"),
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="one prompt, or one per block")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="seed of the noise; the run's")] = None,
) -> None:
    """Generate a clip block by block, as evaluation does."""
    from evenspan.train.sample import sample_run

    written = sample_run(run_dir, out=out, prompts=prompt or [], seed=seed, overrides=overrides or [])
    print(f"wrote {written}")
