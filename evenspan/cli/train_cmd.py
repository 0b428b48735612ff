"""`evenspan train`: checks everything, then starts or joins the ranks. Torch is imported after the check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from evenspan.check.rules import check_file
from evenspan.config.environment import LaunchEnv, launch_env
from evenspan.errors import ConfigError, Finding, TopologyError

ConfigOption = Annotated[
    Path,
    typer.Option("--config", "--config_path", "--config-path", help="configuration, .yaml or literal .py"),
]
MOST_LOCAL_RANKS = 1024
NprocOption = Annotated[
    int | None,
    typer.Option("--nproc", min=1, max=MOST_LOCAL_RANKS, help="ranks to start on this machine"),
]
LogdirOption = Annotated[
    Path | None, typer.Option("--logdir", help="run directory; runs/<name of the configuration> by default")
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--sequence_parallel_size", "--sequence-parallel-size", help="the same as sequence_parallel_size=N"
    ),
]
BlockOption = Annotated[
    str | None,
    typer.Option("--num_frame_per_block", "--num-frame-per-block", help="the same as num_frame_per_block=N"),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--image_or_video_shape", "--image-or-video-shape", help='latent shape, "[batch, frames, C, H, W]"'
    ),
]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings that replace the file's")
]


def train(  # noqa: PLR0917 - typer reads options from parameters
    config: ConfigOption,
    overrides: OverridesArgument = None,
    nproc: NprocOption = None,
    logdir: LogdirOption = None,
    sequence_parallel_size: SizeOption = None,
    num_frame_per_block: BlockOption = None,
    image_or_video_shape: ShapeOption = None,
) -> None:
    """Train, here or as one rank of torchrun, mpirun or srun. Every configuration error is found first."""
    flags = {
        "sequence_parallel_size": sequence_parallel_size,
        "num_frame_per_block": num_frame_per_block,
        "image_or_video_shape": image_or_video_shape,
    }
    settings = [f"{name}={value}" for name, value in flags.items() if value is not None]
    settings += overrides or []
    where = logdir or Path("runs") / config.stem
    if nproc is not None:
        _start_ranks(config, settings, nproc=nproc, logdir=where)
        return
    env = launch_env()
    result = check_file(config, overrides=settings, world_size=env.world_size)
    checked = result.legal_config()

    from evenspan.train.launch import run

    run(checked, logdir=where, env=env)


def _start_ranks(config: Path, settings: Sequence[str], *, nproc: int, logdir: Path) -> None:
    """Checks once for all, then starts `nproc` ranks that run the same command without --nproc."""
    env = _outer_launcher()
    if env.world_size > 1:
        fact = f"this process is rank {env.rank} of {env.world_size} of {env.launcher} already"
        hint = "leave --nproc out: the launcher starts the ranks"
        raise ConfigError([Finding(code="T113", at=f"--nproc {nproc}", fact=fact, hint=hint)])
    check_file(config, overrides=settings, world_size=nproc).legal_config()

    from evenspan.train.launch import launch_local

    launch_local(["--config", str(config), "--logdir", str(logdir), *settings], nproc=nproc)


def _outer_launcher() -> LaunchEnv:
    """The launcher above --nproc. Half a set of variables is none: a batch script has some of srun's."""
    try:
        return launch_env()
    except TopologyError:
        return LaunchEnv()
