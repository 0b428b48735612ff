"""Sharded checkpoints that appear whole or not at all, and load at any other degrees.

Every rank writes its shards through torch.distributed.checkpoint (DCP) into a hidden directory, which rank 0
renames when all are on disk. A checkpoint that it replaces is set aside until then, and one that is dropped
is renamed before it is deleted: a reader never meets a torn checkpoint, nor a moment without a whole one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from evenspan.errors import CheckpointError
from evenspan.train.ema import Ema

logger = logging.getLogger("evenspan")

_STATE_FILE = "state.json"
_NAME = re.compile(r"step_\d{8}")
_PARTIAL, _ASIDE, _DROPPED = ".partial_", ".aside_", ".dropped_"
"""What a directory is called while it is written, while its successor takes its place, while it goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands; a function of the global data stream alone, so it means the same at any degrees."""

    step: int
    """Optimizer steps completed."""
    samples: int
    """Samples consumed by all replicas together: the global data cursor."""


def save_checkpoint(
    directory: Path, *, model: nn.Module, optimizer: Optimizer, ema: Ema, progress: Progress, keep: int
) -> Path:
    """Write `step_########` under `directory` and drop the oldest beyond `keep` (0 keeps all).

    Collective over all ranks. Raises CheckpointError K101 on every rank when any of them could not write;
    what was written is removed and earlier checkpoints are untouched.
    """
    final = directory / f"step_{progress.step:08d}"
    partial = directory / f"{_PARTIAL}{final.name}"
    fault = _write(partial, _state(model, optimizer, ema), progress)
    faults = _all_ranks(fault)
    if any(faults):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            "K101",
            f"{final} could not be written: {next(filter(None, faults))}",
            hint="free space or fix the directory and start again: the run resumes from the last checkpoint",
        )
    if dist.get_rank() == 0:
        _put_in_place(partial, final)
        for old in list_checkpoints(directory)[: -keep or None] if keep else []:
            _drop(old)
    dist.barrier()
    return final


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer, ema: Ema) -> Progress:
    """Fill model, optimizer and average from `path`, whatever degrees wrote it. Collective over all ranks.

    Raises CheckpointError K102 when the checkpoint cannot be read.
    """
    state = _state(model, optimizer, ema)
    try:
        dcp.load(state, checkpoint_id=path)
        progress = read_progress(path)
    except (CheckpointException, OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return progress


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints under `directory`, oldest first; one set aside counts until its successor does."""
    if not directory.is_dir():
        return []
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):  # names that begin with a dot come first
        name = path.name.removeprefix(_ASIDE)
        if _NAME.fullmatch(name) and (path / _STATE_FILE).is_file():
            found[name] = path
    return [found[name] for name in sorted(found)]


def read_progress(path: Path) -> Progress:
    """The progress that the checkpoint at `path` recorded."""
    state = json.loads((path / _STATE_FILE).read_text(encoding="ascii"))
    return Progress(step=int(state["step"]), samples=int(state["samples"]))


def recover(directory: Path) -> None:
    """Undo what an interrupted save left: what was set aside returns unless its successor is there."""
    if not directory.is_dir():
        return
    for aside in directory.glob(f"{_ASIDE}*"):
        final = directory / aside.name.removeprefix(_ASIDE)
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(final)
    for prefix in (_PARTIAL, _DROPPED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`; what stood there is set aside first and deleted afterwards."""
    aside = final.with_name(f"{_ASIDE}{final.name}")
    replaces = final.exists()
    if replaces:
        final.rename(aside)
    partial.rename(final)
    if replaces:
        shutil.rmtree(aside)


def _drop(path: Path) -> None:
    """Delete a checkpoint; half deleted it no longer bears a checkpoint's name."""
    dropped = path.with_name(f"{_DROPPED}{path.name}")
    path.rename(dropped)
    shutil.rmtree(dropped)


def load_average(path: Path, shadow: dict[str, Tensor]) -> None:
    """Fill the tensors of `shadow` with the averaged weights of `path`, in this process alone."""
    _load_alone({"ema": shadow}, path)


def load_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Fill the tensors of `weights` with the trained weights of `path`, in this process alone."""
    _load_alone({"model": weights}, path)


def _load_alone(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        # One process on purpose: DCP warns that there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        except (CheckpointException, OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from None


def _state(model: nn.Module, optimizer: Optimizer, ema: Ema) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "ema": dict(ema.shadow)}


def _write(partial: Path, state: dict[str, Any], progress: Progress) -> str:
    """The fault that this rank met, or an empty string."""
    fault = ""
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    except OSError as error:
        fault = _cause(error)
    if any(_all_ranks(fault)):
        return fault
    try:
        dcp.save(state, checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / _STATE_FILE).write_text(json.dumps(asdict(progress)), encoding="ascii")
    except (CheckpointException, OSError, RuntimeError) as error:
        fault = _cause(error)
    return fault


def _all_ranks(fault: str) -> list[str]:
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    return faults


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "K102",
        f"{path} cannot be read: {_cause(error)}",
        hint="remove that directory to resume from the checkpoint before it",
    )


def _cause(error: BaseException) -> str:
    """Which rank met what, as one line; DCP's report of all ranks is taken apart."""
    causes = error.failures.items() if isinstance(error, CheckpointException) else [(_rank(), (error,))]
    return "; ".join(f"rank {rank}: {_line(failure[0])}" for rank, failure in causes)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
