"""LongLive's names for the two process groups, for code that expects to find them in one place.

Nothing in evenspan reads these: its modules are given their groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from evenspan.errors import CommError


@dataclass(slots=True)
class _Published:
    sequence: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None


_PUBLISHED = _Published()


def set_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Publishes the group whose ranks share one sequence; None withdraws it."""
    _PUBLISHED.sequence = group


def set_data_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Publishes the group whose ranks read different samples; None withdraws it."""
    _PUBLISHED.data = group


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The published sequence-parallel group. Raises X301 when there is none."""
    return _published(_PUBLISHED.sequence, "sequence")


def get_data_parallel_group() -> dist.ProcessGroup:
    """The published data-parallel group. Raises X301 when there is none."""
    return _published(_PUBLISHED.data, "data")


def get_sequence_parallel_rank() -> int:
    """This rank's place in the published sequence-parallel group; 0 without one."""
    return 0 if _PUBLISHED.sequence is None else _PUBLISHED.sequence.rank()


def get_sequence_parallel_world_size() -> int:
    """The published sequence-parallel size; 1 without a group."""
    return 1 if _PUBLISHED.sequence is None else _PUBLISHED.sequence.size()


def get_data_parallel_rank() -> int:
    """This rank's place in the published data-parallel group; 0 without one."""
    return 0 if _PUBLISHED.data is None else _PUBLISHED.data.rank()


def get_data_parallel_world_size() -> int:
    """The published data-parallel size; 1 without a group."""
    return 1 if _PUBLISHED.data is None else _PUBLISHED.data.size()


def _published(group: dist.ProcessGroup | None, kind: str) -> dist.ProcessGroup:
    if group is None:
        raise CommError(
            "X301",
            f"no {kind}-parallel group was set",
            hint=f"call set_{kind}_parallel_group(topology.group(...)) after the mesh is built",
        )
    return group
