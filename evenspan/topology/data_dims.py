"""Which dimensions of a device mesh give ranks different samples, and which let ranks share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenspan.errors import TopologyError, nearest
from evenspan.topology.degrees import Axis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DP_DIMS = (Axis.REPLICATE.value, Axis.SHARD.value)
"""The axes that multiply the batch."""

SHARING_DIMS = frozenset({Axis.CONTEXT.value, Axis.TENSOR.value, "cp", "tp", "sp", "sequence"})
"""Names of dimensions whose ranks hold parts of one sample or of one projection."""


def split_dims(mesh: DeviceMesh, dp_dims: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(dp_dims, the other dimensions of the mesh), checked; the second share their samples.

    Raises TopologyError T121 for a name that the mesh does not have or that comes twice, T122 for a dimension
    whose ranks share samples, T123 when `replicate` or `shard`, of more than one rank, is left out.
    """
    names = tuple(mesh.mesh_dim_names or ())
    for place, name in enumerate(dp_dims):
        if name in SHARING_DIMS:
            raise TopologyError(
                "T122",
                f"dp_dims {list(dp_dims)} holds {name}, whose ranks must read the same samples",
                hint=f"use dp_dims {[kept for kept in dp_dims if kept not in SHARING_DIMS]}",
            )
        if name not in names or name in dp_dims[:place]:
            what = "comes twice" if name in names else "is no dimension of the mesh"
            known = list(names) or "no named dimensions"
            near = nearest(name, [option for option in names if option not in SHARING_DIMS])
            raise TopologyError(
                "T121",
                f"{name} of dp_dims {list(dp_dims)} {what}; the mesh has {known}",
                hint=f"write {' or '.join(near)}" if near else "build the mesh with mesh_dim_names",
            )
    left_out = [name for name in DP_DIMS if name in names and name not in dp_dims and _size(mesh, name) > 1]
    if left_out:
        ranks = ", ".join(f"{name} of {_size(mesh, name)} ranks" for name in left_out)
        raise TopologyError(
            "T123",
            f"dp_dims {list(dp_dims)} leaves out {ranks}, which would train on the same samples",
            hint=f"use dp_dims {[name for name in names if name in dp_dims or name in left_out]}",
        )
    return tuple(dp_dims), tuple(name for name in names if name not in dp_dims)


def data_slot(mesh: DeviceMesh, dp_dims: Sequence[str]) -> tuple[int, int]:
    """(slot, slots) of this rank: its place along checked `dp_dims`, the first outermost.

    Raises TopologyError T101 on a rank outside the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TopologyError(
            "T101", "this rank is outside the mesh", hint="build the mesh over all ranks that read data"
        )
    names = tuple(mesh.mesh_dim_names or ())
    slot, slots = 0, 1
    for name in dp_dims:
        size = _size(mesh, name)
        slot, slots = slot * size + coordinate[names.index(name)], slots * size
    return slot, slots


def _size(mesh: DeviceMesh, name: str) -> int:
    return mesh.shape[(mesh.mesh_dim_names or ()).index(name)]
