"""How ranks start: torch's own elastic launcher for local ranks, and the body that every rank runs."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from evenspan.config.environment import LaunchEnv, default_threads
from evenspan.config.tasks import AnyRunConfig
from evenspan.errors import CommError, EvenspanError, RunError, Teller

logger = logging.getLogger("evenspan")

SIGNS_OF_A_LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)
"""What gloo and NCCL say when the process at the other end is gone."""


class RanksError(RunError):
    """Ranks of a local launch that ended badly; carries the exit code the launcher should end with."""

    def __init__(self, fact: str, *, hint: str, exit_code: int) -> None:
        super().__init__("R104", fact, hint=hint)
        self.exit_code = exit_code


def launch_local(arguments: Sequence[str], *, nproc: int) -> None:
    """Run `python -m evenspan train ARGUMENTS` on `nproc` local ranks through `torch.distributed.launcher`.

    Blocks until all end. Raises RunError R104 naming the first rank that failed; the others are ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    default_threads(1)
    _quiet_launcher()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "evenspan", "train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RanksError(
            f"rank {rank} {_how(failure.exitcode)}; the other ranks were stopped",
            hint="its message stands above; the last complete checkpoint is untouched",
            exit_code=failure.exitcode if failure.exitcode > 0 else 1,
        ) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise RanksError(
            f"stopped by {name}",
            hint="run the same command again to resume from the last checkpoint",
            exit_code=128 + int(error.sigval),
        ) from None


def run(config: AnyRunConfig, *, logdir: Path, env: LaunchEnv) -> None:
    """Train `config` as the rank that `env` names; returns when the run is complete.

    Every rank calls this. Raises the named errors of evenspan.errors; the process group is gone afterwards.
    """
    from evenspan.topology.mesh import first_to_say, init_distributed, leave_distributed
    from evenspan.train.loop import train

    _configure_logging(env)
    device = init_distributed(env)
    try:
        train(config, logdir=logdir, device=device)
    except (EvenspanError, RuntimeError) as error:
        named = error if isinstance(error, EvenspanError) else lost_rank(error)
        if named is None:
            raise
        # No farewell: the peers may be inside a collective that this rank will never join, and the launcher
        # ends them as soon as this process is gone.
        if env.world_size > 1:
            named.told_by = Teller.THIS_RANK if first_to_say(str(named)) else Teller.OTHER_RANK
        raise named from named.__cause__
    leave_distributed()


def lost_rank(error: RuntimeError) -> CommError | None:
    """The named error where a collective failed because another rank ended; None for any other failure.

    gloo and NCCL raise bare RuntimeErrors, so the only sign is their text.
    """
    reason = next((sign for sign in SIGNS_OF_A_LOST_RANK if sign in str(error)), None)
    if reason is None:
        return None
    return CommError(
        "X210",
        f"another rank of this run has ended ({reason.lower()})",
        hint="its own message says why; without one it was killed, often for lack of memory",
    )


def _configure_logging(env: LaunchEnv) -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if env.rank == 0 else logging.WARNING)
    logger.propagate = False


def _quiet_launcher() -> None:
    """Torch's launcher logs each child's failure in a banner; ours is one line, printed by the command."""
    for name in (
        "torch.distributed.elastic.multiprocessing.api",
        "torch.distributed.elastic.agent.server.api",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"
