"""How a wrong gradient relates to the right one: the relation names the mistake.

A gradient that each of T ranks holds as g / T, or only for its own tokens, or T times, is wrong in a way that
says what was forgotten or done twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from evenspan.topology.degrees import Axis, Degrees

EXACT = 1e-7
"""A relation holds when its relative residual is below this: far above rounding, far below a mistake."""


class Relation(StrEnum):
    """What holds between the ranks' gradients and the right one."""

    EQUAL = "equal"
    MISSING_SUM = "missing sum"
    """Each rank has its own part; their sum over an axis is right."""
    TOO_LARGE = "too large"
    """A whole multiple: summed once too often, or counted by every rank."""
    TOO_SMALL = "too small"
    """A whole fraction: averaged where a sum belongs, or divided by a count of more ranks."""
    SCALED = "scaled"
    """A multiple of no obvious origin."""
    DROPPED_SHARD = "dropped shard"
    """Right in some entries, zero in the others."""
    ABSENT = "absent"
    """No gradient, or zeros."""
    SHOULD_BE_ZERO = "should be zero"
    NOT_FINITE = "not finite"
    SHAPE = "shape"
    """Of another shape."""
    DIFFERS_ON_RANKS = "differs on ranks"
    """Right on some ranks only."""
    UNRELATED = "unrelated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Related:
    """A relation with its numbers, for a message."""

    relation: Relation
    text: str
    axes: tuple[Axis, ...] = ()
    """The mesh axes that explain it."""
    factor: float = 1.0
    """How many times too large the gradient is."""


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`; the norm of `got` itself where `want` is zero."""
    if got.shape != want.shape:
        return float("inf")
    norm = torch.linalg.vector_norm(want).item()
    difference = torch.linalg.vector_norm(got - want).item()
    return difference / norm if norm > 0 else difference


def relate(parts: Sequence[Tensor], whole: Tensor, *, degrees: Degrees) -> Related:
    """The relation of every rank's gradient, in rank order, to the right one `whole`."""
    if any(part.shape != whole.shape for part in parts):
        return Related(
            relation=Relation.SHAPE,
            text=f"is {list(parts[0].shape)} on rank 0, should be {list(whole.shape)}",
        )
    if not all(torch.isfinite(part).all() for part in parts):
        return Related(relation=Relation.NOT_FINITE, text="is not finite")
    errors = [relative_error(part, whole) for part in parts]
    if max(errors) < EXACT:
        return Related(relation=Relation.EQUAL, text=f"differs by {max(errors):.1e}")
    if not any(part.any() for part in parts):
        return Related(relation=Relation.ABSENT, text="is zero on every rank", factor=0.0)
    if not whole.any():
        return Related(relation=Relation.SHOULD_BE_ZERO, text="should be zero and is not")
    return (
        _multiple(parts, whole, degrees)
        or _sum(parts, whole, degrees)
        or _dropped(parts, whole)
        or _some_ranks(errors)
        or Related(relation=Relation.UNRELATED, text="has no simple relation to the right one")
    )


def _multiple(parts: Sequence[Tensor], whole: Tensor, degrees: Degrees) -> Related | None:
    """The same multiple on every rank."""
    square = whole.square().sum()
    factors = [((part * whole).sum() / square).item() for part in parts]
    factor = factors[0]
    if any(abs(other - factor) > EXACT * abs(factor) for other in factors):
        return None
    if any(relative_error(part, whole * factor) > EXACT * abs(factor) for part in parts):
        return None
    for axes in _axis_sets(degrees):
        size = prod(degrees.by_axis()[axis] for axis in axes)
        named = _named(axes, degrees)
        if abs(factor - size) < EXACT * size:
            text = f"is {size} times too large: {named} counted {size} times, or summed twice"
            return Related(relation=Relation.TOO_LARGE, text=text, axes=axes, factor=factor)
        if abs(factor * size - 1) < EXACT * size:
            text = f"is 1/{size} of the right one: averaged over {named} where a sum belongs"
            return Related(relation=Relation.TOO_SMALL, text=text, axes=axes, factor=factor)
    return Related(relation=Relation.SCALED, text=f"is {factor:.6g} times the right one", factor=factor)


def _sum(parts: Sequence[Tensor], whole: Tensor, degrees: Degrees) -> Related | None:
    """Parts of a sum over one or more axes."""
    for axes in _axis_sets(degrees):
        sums = [sum((parts[rank] for rank in group[1:]), parts[group[0]]) for group in _groups(axes, degrees)]
        named = _named(axes, degrees)
        if all(relative_error(total, whole) < EXACT for total in sums):
            text = f"lacks the sum over {named}: each rank has its own part"
            return Related(relation=Relation.MISSING_SUM, text=text, axes=axes)
        size = prod(degrees.by_axis()[axis] for axis in axes)
        if all(relative_error(total, whole * size) < EXACT * size for total in sums):
            text = f"lacks the mean over {named}: each rank has its own estimate"
            return Related(relation=Relation.MISSING_SUM, text=text, axes=axes)
    return None


def _dropped(parts: Sequence[Tensor], whole: Tensor) -> Related | None:
    """Right where it is not zero."""
    for rank, part in enumerate(parts):
        there = part != 0
        same = relative_error(part, torch.where(there, whole, 0.0)) < EXACT
        if same and not there.all() and (whole[~there] != 0).any():
            share = there.double().mean().item()
            text = f"has {share:.0%} of its entries on rank {rank}, the others are zero: a shard was dropped"
            return Related(relation=Relation.DROPPED_SHARD, text=text)
    return None


def _some_ranks(errors: Sequence[float]) -> Related | None:
    """Right on some ranks."""
    wrong = [rank for rank, error in enumerate(errors) if error >= EXACT]
    if len(wrong) == len(errors):
        return None
    return Related(relation=Relation.DIFFERS_ON_RANKS, text=f"is wrong on ranks {wrong} only")


def _axis_sets(degrees: Degrees) -> Iterator[tuple[Axis, ...]]:
    """Single axes first, innermost first, then combinations."""
    split = [axis for axis, degree in reversed(degrees.by_axis().items()) if degree > 1]
    for count in range(1, len(split) + 1):
        yield from combinations(split, count)


def _groups(axes: tuple[Axis, ...], degrees: Degrees) -> list[list[int]]:
    """The ranks that differ only on `axes`."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(degrees.world_size):
        coordinates = degrees.coordinates(rank)
        places: Mapping[Axis, int] = {
            Axis.REPLICATE: coordinates.replicate,
            Axis.SHARD: coordinates.shard,
            Axis.CONTEXT: coordinates.context,
            Axis.TENSOR: coordinates.tensor,
        }
        key = tuple(place for axis, place in places.items() if axis not in axes)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _named(axes: tuple[Axis, ...], degrees: Degrees) -> str:
    return " x ".join(f"{axis} {degrees.by_axis()[axis]}" for axis in axes)
