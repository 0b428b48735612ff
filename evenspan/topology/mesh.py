"""The process groups of a run: one device mesh, and the groups and meshes the other layers ask for."""

from __future__ import annotations

import gc
import hashlib
import time
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenspan.config.environment import LaunchEnv, Launcher
from evenspan.errors import TopologyError
from evenspan.topology.degrees import Axis, Degrees, RankCoordinates

_BUILT: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Degrees, torch.device], Topology]] = (
    WeakKeyDictionary()
)
"""The topologies of each world. Every gloo group keeps three threads that wake 100 times a second, so the
same degrees twice should not cost a second dozen of groups."""

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for the other ranks before the run is declared dead."""

MEETING_TIMEOUT = timedelta(minutes=2)
"""How long a rank waits at the start for the others to arrive."""

POLL_S = 0.2
"""How often a rank that waits for rank 0 asks whether it is done."""

LET_RANK_0_SPEAK_S = 0.3
"""Head start of rank 0, whose output is read first, where all ranks have the same to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Where this rank stands and the groups it belongs to. Without a process group every group is None."""

    degrees: Degrees
    mesh: DeviceMesh | None
    """Axes replicate, shard, context, tensor; None for a single process without a process group."""
    device: torch.device
    fsdp_mesh: DeviceMesh | None
    """What parameters are sharded over: flatten(shard, context), inside replicate when that is above 1."""
    tensor_mesh: DeviceMesh | None
    """This rank's part of the tensor axis; None at degree 1."""
    loss_group: dist.ProcessGroup | None
    """All ranks whose losses and counts are summed: replicate, shard and context."""
    dp_group: dist.ProcessGroup | None
    """The ranks that read different samples and stand at the same context and tensor place."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def coordinates(self) -> RankCoordinates:
        """This rank's place on every axis."""
        return self.degrees.coordinates(self.rank)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """This rank's group along `axis`; None at degree 1, where nothing needs to travel."""
        if self.mesh is None or self.degrees.by_axis()[axis] == 1:
            return None
        return self.mesh.get_group(axis.value)


def build_topology(degrees: Degrees, *, device: torch.device) -> Topology:
    """The mesh and groups of this run; call on every rank after `init_distributed`.

    A single process may do without a process group. The same degrees in the same world give the same topology
    again. Raises T103 when the degrees do not fill the world.
    """
    initialized = dist.is_initialized()
    world_size = dist.get_world_size() if initialized else 1
    if degrees.world_size != world_size:
        raise TopologyError(
            "T103",
            f"the degrees need {degrees.world_size} ranks, but the world has {world_size}",
            hint=f"start {degrees.world_size} ranks, or change parallel.mesh",
        )
    if not initialized:
        return Topology(
            degrees=degrees,
            mesh=None,
            device=device,
            fsdp_mesh=None,
            tensor_mesh=None,
            loss_group=None,
            dp_group=None,
        )
    world = dist.group.WORLD
    assert world is not None, "initialized"
    known = _BUILT.setdefault(world, {})
    if (degrees, device) not in known:
        known[degrees, device] = _build(degrees, device=device)
    return known[degrees, device]


def _build(degrees: Degrees, *, device: torch.device) -> Topology:
    world = init_device_mesh(device.type, (degrees.world_size,), mesh_dim_names=("world",))
    sizes = {axis.value: degree for axis, degree in degrees.by_axis().items()}
    # Views of one root mesh, so that tensors sharded over several of them can be combined. Each view makes
    # its groups on all ranks, in this order.
    mesh = _view(world, sizes)
    sharded = _view(
        world,
        {"replicate": degrees.replicate, "fsdp": degrees.shard * degrees.context, "tensor": degrees.tensor},
    )
    inner = {"context": degrees.context, "tensor": degrees.tensor}
    data = _view(world, {"dp": degrees.dp, **inner})
    loss = _view(world, {"loss": degrees.dp * degrees.context, "tensor": degrees.tensor})
    return Topology(
        degrees=degrees,
        mesh=mesh,
        device=device,
        fsdp_mesh=sharded["replicate", "fsdp"] if degrees.replicate > 1 else sharded["fsdp"],
        # Of the same view as `fsdp_mesh`: a weight may be sharded over both.
        tensor_mesh=sharded["tensor"] if degrees.tensor > 1 else None,
        loss_group=_group_of(loss["loss"]),
        dp_group=_group_of(data["dp"]),
    )


def _view(world: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """The same ranks as a mesh of named dims, outer to inner."""
    return world._unflatten(0, tuple(sizes.values()), tuple(sizes))


def init_distributed(
    env: LaunchEnv,
    *,
    backend: str | None = None,
    meeting: timedelta = MEETING_TIMEOUT,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> torch.device:
    """Joins the run's process group and gives this rank's device. Call once per process.

    `backend` defaults to NCCL (and gloo for CPU tensors) where CUDA is there, gloo elsewhere. A single
    process gets a group of one without opening a port. Raises T114 when the machine has fewer GPUs than
    local ranks, T115 when not all ranks arrive within `meeting`.
    """
    cuda = torch.cuda.is_available() and backend != "gloo"
    if cuda and env.local_rank >= torch.cuda.device_count():
        raise TopologyError(
            "T114",
            f"local rank {env.local_rank} has no GPU: this machine shows {torch.cuda.device_count()}",
            hint="start at most one rank per GPU, or ask for the gloo backend",
        )
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if env.launcher is Launcher.SINGLE:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return device
    env.export()
    try:
        store = _meet(env, meeting)
        dist.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout
        )
    except dist.DistError as error:
        raise TopologyError(
            "T115",
            f"rank {env.rank} of {env.world_size} does not meet the others at "
            f"{env.master_addr}:{env.master_port}: {str(error).splitlines()[0]}",
            hint=f"start all {env.world_size} ranks; name in MASTER_ADDR the machine of rank 0, and in "
            "MASTER_PORT a port that is free there",
        ) from error
    return device


def _meet(env: LaunchEnv, timeout: timedelta) -> dist.Store:
    """The store of the run, once every rank has come to it. Raises DistError after `timeout`."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if store.add("evenspan/arrived", 1) == env.world_size:
        store.set("evenspan/complete", "")
    try:
        store.wait(["evenspan/complete"], timeout)
    except dist.DistError as error:
        arrived = store.add("evenspan/arrived", 0)
        raise dist.DistError(f"{arrived} of {env.world_size} ranks arrived in {timeout.seconds} s") from error
    return dist.PrefixStore("evenspan", store)


def first_to_say(text: str) -> bool:
    """True on one of the ranks that call this with the same `text`: rank 0, if it is among the first.

    Works while other ranks hang or are gone: it asks the run's store, and is True where that is gone too.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    if dist.get_rank() > 0:
        time.sleep(LET_RANK_0_SPEAK_S)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    try:
        return dist.distributed_c10d._get_default_store().add(f"evenspan/said/{key}", 1) == 1
    except dist.DistError:
        return True


def wait_for_rank_0(what: str) -> None:
    """Returns on every rank once rank 0 has called this with the same `what`, however long that takes.

    For work that only rank 0 does: a collective would give up after its timeout. Raises DistError when the
    run's store is gone, which ends with rank 0 or with the launcher.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"evenspan/done/{what}"
    if dist.get_rank() == 0:
        store.set(key, "")
    while not store.check([key]):
        time.sleep(POLL_S)
    dist.barrier()


def leave_distributed() -> None:
    """Ends the run's process groups and their threads; every rank calls it, after its last collective.

    A gloo group that something still holds keeps its threads, and one that wakes while the interpreter shuts
    down ends the process with SIGABRT. DTensor's caches hold meshes for ever, so the meshes let go of their
    groups. Topologies of this world are of no use afterwards.
    """
    dist.barrier()
    _forget_topologies()
    gc.collect()  # models and their groups refer to each other
    dist.destroy_process_group()


def _forget_topologies() -> None:
    for known in _BUILT.values():
        for topology in known.values():
            if topology.mesh is not None:
                vars(topology.mesh._get_root_mesh()).get("_pg_registry", {}).clear()
    _BUILT.clear()


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None
