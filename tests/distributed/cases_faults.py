"""What each rank runs for the tests of faults during training."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from evenspan.config.schema import RunConfig
from evenspan.errors import EvenspanError
from evenspan.testing import RankContext
from evenspan.train import loop


def error_of_training(ctx: RankContext, config: RunConfig, logdir: Path) -> str:
    """The named error that training ends with on this rank, or an empty string."""
    del ctx
    try:
        loop.train(config, logdir=logdir, device=torch.device("cpu"))
    except EvenspanError as error:
        return str(error)
    return ""


def error_with_small_files(
    ctx: RankContext, config: RunConfig, logdir: Path, rank: int, limit_bytes: int
) -> str:
    """The same where the system refuses large files during one rank's saves, as a full disk would."""
    whole = loop.save_checkpoint

    def short_of_space(directory: Path, **parts: Any) -> Path:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ctx.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            return whole(directory, **parts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    loop.save_checkpoint = short_of_space
    try:
        return error_of_training(ctx, config, logdir)
    finally:
        loop.save_checkpoint = whole


def error_with_other_data(ctx: RankContext, config: RunConfig, other: Path, logdir: Path) -> str:
    """The same where rank 1 reads the data under `other`, as a node with a stale copy would."""
    data = config.data.model_copy(update={"data_path": str(other)})
    return error_of_training(
        ctx, config.model_copy(update={"data": data}) if ctx.rank == 1 else config, logdir
    )
