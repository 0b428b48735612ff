"""Degrees of the mesh axes, and where each rank stands on them: arithmetic only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isqrt, prod

from evenspan.errors import TopologyError


class Axis(StrEnum):
    """The mesh axes, outer to inner: ranks that differ only on an inner axis are neighbours."""

    REPLICATE = "replicate"
    SHARD = "shard"
    CONTEXT = "context"
    TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoordinates:
    """Where one global rank stands on every axis; `dp` is its slot among the data-parallel ranks."""

    replicate: int
    shard: int
    context: int
    tensor: int
    dp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The size of every mesh axis. Raises T102 when one is below 1."""

    replicate: int = 1
    """Copies of the sharded parameters; each copy reads other samples."""
    shard: int = 1
    """Ranks that share parameters (with `context`) and read different samples."""
    context: int = 1
    """Ranks that share one sample's tokens."""
    tensor: int = 1
    """Ranks that share each projection's width."""

    def __post_init__(self) -> None:
        for axis, degree in self.by_axis().items():
            if degree < 1:
                raise TopologyError(
                    "T102",
                    f"parallel.mesh.{axis} = {degree} is not a degree",
                    hint="write a positive number, or -1 on one axis to let the world size decide",
                )

    @classmethod
    def solve(cls, *, replicate: int, shard: int, context: int, tensor: int, world_size: int) -> Degrees:
        """The degrees whose product is `world_size`; one of them may be -1 and is filled in.

        Raises T102 for a degree that is neither positive nor the only -1, T103 when no degrees fit.
        """
        wanted = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
        free = [name for name, degree in wanted.items() if degree == -1]
        if len(free) > 1:
            raise TopologyError(
                "T102",
                f"{len(free)} degrees are -1: " + ", ".join(f"parallel.mesh.{name}" for name in free),
                hint=f"leave -1 on one axis only, for example parallel.mesh.{free[-1]}: 1",
            )
        if not free:
            degrees = cls(**wanted)
            if degrees.world_size != world_size:
                raise _does_not_fit(wanted, world_size)
            return degrees
        fixed = cls(**{**wanted, free[0]: 1})
        if world_size < 1 or world_size % fixed.world_size:
            raise _does_not_fit(wanted, world_size)
        return cls(**{**wanted, free[0]: world_size // fixed.world_size})

    def by_axis(self) -> dict[Axis, int]:
        """The degree of every axis, outer to inner."""
        return {
            Axis.REPLICATE: self.replicate,
            Axis.SHARD: self.shard,
            Axis.CONTEXT: self.context,
            Axis.TENSOR: self.tensor,
        }

    @property
    def dp(self) -> int:
        """Data-parallel ranks: the only ones that multiply the batch."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return prod(self.by_axis().values())

    def coordinates(self, rank: int) -> RankCoordinates:
        """Where global rank `rank` stands. Raises T101 for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                "T101",
                f"rank {rank} is outside the world of {self.world_size} ranks",
                hint=f"ranks run from 0 to {self.world_size - 1}",
            )
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        replicate, shard = divmod(rest, self.shard)
        return RankCoordinates(replicate=replicate, shard=shard, context=context, tensor=tensor, dp=rest)

    def context_groups(self) -> list[list[int]]:
        """The global ranks of every group that shares one sample's tokens; contiguous while `tensor` is 1."""
        return self._groups(Axis.CONTEXT)

    def dp_groups(self) -> list[list[int]]:
        """The global ranks of every group that reads different samples; strided by context x tensor."""
        inner = self.context * self.tensor
        return [list(range(first, self.world_size, inner)) for first in range(inner)]

    def _groups(self, axis: Axis) -> list[list[int]]:
        sizes = list(self.by_axis().values())
        position = list(self.by_axis()).index(axis)
        stride = prod(sizes[position + 1 :])
        degree = sizes[position]
        firsts = [rank for rank in range(self.world_size) if (rank // stride) % degree == 0]
        return [[first + step * stride for step in range(degree)] for first in firsts]


def divisors(number: int) -> list[int]:
    """Every positive divisor of a positive number, ascending."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    large = [number // candidate for candidate in reversed(small)]
    return small + [candidate for candidate in large if candidate > small[-1]]


def _does_not_fit(wanted: dict[str, int], world_size: int) -> TopologyError:
    product = " x ".join(f"{name} {degree}" for name, degree in wanted.items())
    fixed = prod(degree for degree in wanted.values() if degree != -1)
    below, above = world_size // fixed * fixed, -(-world_size // fixed) * fixed
    if -1 in wanted.values():
        fact = f"{product} does not divide a world of {world_size}"
        sizes = sorted({size for size in (below, above) if size > 0})
        hint = f"start {' or '.join(str(size) for size in sizes or [fixed])} ranks, or change a degree"
    else:
        fact = f"{product} = {fixed} ranks, but the world has {world_size}"
        hint = f"start {fixed} ranks, or write -1 on one axis"
    return TopologyError("T103", fact, hint=hint)
