"""Who this process is among the ranks, from the variables of whichever launcher started it.

The only reader and writer of `os.environ`. torchrun's variables win; OpenMPI's and SLURM's are translated;
without any of them the process is rank 0 of 1. Half a set of variables is an error, never a guess.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from evenspan.errors import TopologyError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20000, 20000
LAST_PORT = 65535
OPENMPI_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")


class Launcher(StrEnum):
    """What started this process."""

    SINGLE = "single"
    TORCHRUN = "torchrun"
    OPENMPI = "openmpi"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnv:
    """This process among the ranks of a run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine: the index of its device."""
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    """0 lets the only rank of a single-process run take any free port."""
    launcher: Launcher = Launcher.SINGLE

    @property
    def is_main(self) -> bool:
        """True on the one rank of the whole run that speaks."""
        return self.rank == 0

    def export(self) -> None:
        """Sets the variables that torch's `env://` rendezvous reads."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


def launch_env(variables: Mapping[str, str] | None = None) -> LaunchEnv:
    """This process's place in the run, from `variables` (default: the process environment).

    Raises TopologyError: T110 for an incomplete set of variables, T111 for a number that cannot be, T112 when
    ranks of several machines have no common address.
    """
    found = os.environ if variables is None else variables
    if "RANK" in found or "WORLD_SIZE" in found or "LOCAL_RANK" in found:
        env = _from_torchrun(found)
    elif "OMPI_COMM_WORLD_RANK" in found or "OMPI_COMM_WORLD_SIZE" in found:
        env = _from_openmpi(found)
    elif "SLURM_PROCID" in found:
        env = _from_slurm(found)
    else:
        return LaunchEnv()
    return _checked(env)


def _from_torchrun(found: Mapping[str, str]) -> LaunchEnv:
    _require(found, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), start="torchrun")
    world_size = _number(found, "WORLD_SIZE")
    local_world_size = _number(found, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in found else world_size
    return LaunchEnv(
        rank=_number(found, "RANK"),
        world_size=world_size,
        local_rank=_number(found, "LOCAL_RANK"),
        local_world_size=local_world_size,
        master_addr=found["MASTER_ADDR"],
        master_port=_number(found, "MASTER_PORT"),
        launcher=Launcher.TORCHRUN,
    )


def _from_openmpi(found: Mapping[str, str]) -> LaunchEnv:
    names = [f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    _require(found, names, start="mpirun")
    rank, world_size, local_rank, local_world_size = (_number(found, name) for name in names)
    one_machine = local_world_size == world_size
    if "MASTER_ADDR" not in found and not one_machine:
        raise TopologyError(
            "T112",
            f"mpirun started {world_size} ranks, {local_world_size} of them here, and MASTER_ADDR is not set",
            hint="name the machine of rank 0: mpirun -x MASTER_ADDR=<host> ...",
        )
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=found.get("MASTER_ADDR", LOOPBACK),
        master_port=_port(found, _openmpi_job(found), start="mpirun -x MASTER_PORT=29500"),
        launcher=Launcher.OPENMPI,
    )


def _from_slurm(found: Mapping[str, str]) -> LaunchEnv:
    _require(found, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), start="srun")
    world_size = _number(found, "SLURM_NTASKS")
    if "MASTER_ADDR" not in found and "SLURM_STEP_NODELIST" not in found and world_size > 1:
        raise TopologyError(
            "T112",
            f"SLURM_NTASKS={world_size}, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set",
            hint="start the ranks with srun (a batch script alone starts one process), or set MASTER_ADDR",
        )
    hosts = found.get("SLURM_STEP_NODELIST", LOOPBACK)
    return LaunchEnv(
        rank=_number(found, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(found, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(found, world_size),
        master_addr=found.get("MASTER_ADDR", first_host(hosts)),
        master_port=_port(found, _slurm_job(found), start="MASTER_PORT=29500 srun"),
        launcher=Launcher.SLURM,
    )


def _slurm_tasks_here(found: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node: SLURM_STEP_TASKS_PER_NODE is `4(x2),3` = 4, 4, 3; SLURM_NODEID picks one."""
    spelled = found.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", spelled):
        counts += [int(tasks)] * int(nodes or 1)
    if not counts:
        return world_size
    node = _number(found, "SLURM_NODEID") if "SLURM_NODEID" in found else 0
    return counts[min(node, len(counts) - 1)]


def first_host(nodelist: str) -> str:
    """The first machine of a SLURM node list: `gpu[03-05,9],cpu1` gives `gpu03`."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip())
    assert head is not None, f"empty node list {nodelist!r}"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group())


def _openmpi_job(found: Mapping[str, str]) -> str:
    return next((found[name] for name in OPENMPI_JOB_VARIABLES if found.get(name)), "")


def _slurm_job(found: Mapping[str, str]) -> str:
    return "/".join(found[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if found.get(name))


def _port(found: Mapping[str, str], job: str, *, start: str) -> int:
    """MASTER_PORT, else a port that every rank derives alike from the job's name."""
    if "MASTER_PORT" in found:
        return _number(found, "MASTER_PORT")
    if not job:
        raise TopologyError(
            "T110",
            "the launcher names no job, so the ranks cannot agree on MASTER_PORT",
            hint=f"set it: {start} ...",
        )
    digest = hashlib.blake2b(job.encode(), digest_size=8).digest()
    return FIRST_PORT + int.from_bytes(digest, "big") % PORTS


def _require(found: Mapping[str, str], names: tuple[str, ...] | list[str], *, start: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        present = ", ".join(f"{name}={found[name]}" for name in names if name in found)
        raise TopologyError(
            "T110",
            f"{present or 'a launcher'} is set but {', '.join(missing)} is not",
            hint=f"start the ranks with {start}, which sets all of them, or unset them to run one process",
        )


def _number(found: Mapping[str, str], name: str) -> int:
    text = found[name].strip()
    if not text.isdecimal():
        raise TopologyError(
            "T111", f"{name}={found[name]!r} is not a whole number", hint=f"set {name} to 0, 1, 2, ..."
        )
    return int(text)


def _checked(env: LaunchEnv) -> LaunchEnv:
    for name, rank, size in (
        ("rank", env.rank, env.world_size),
        ("local rank", env.local_rank, env.local_world_size),
    ):
        if rank >= size:
            raise TopologyError(
                "T111",
                f"{name} {rank} of {size} ({env.launcher}) does not exist",
                hint=f"the {name} counts from 0 to {size - 1 if size else 0}; check the launcher's variables",
            )
    _check_port(env)
    return env


def _check_port(env: LaunchEnv) -> None:
    if env.master_port > LAST_PORT:
        raise TopologyError(
            "T111",
            f"MASTER_PORT={env.master_port} is no port",
            hint=f"set MASTER_PORT to 1 to {LAST_PORT}",
        )


def shows_gpu(variables: Mapping[str, str] | None = None, *, devices: Path = Path("/dev")) -> bool:
    """Whether this process may use an NVIDIA GPU, as far as can be told without loading torch."""
    found = os.environ if variables is None else variables
    if found.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return False
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


def default_threads(count: int) -> None:
    """Child processes compute with `count` threads each, unless the user has set OMP_NUM_THREADS."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
