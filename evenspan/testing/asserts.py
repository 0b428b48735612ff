"""Assertions about what ranks returned; each failure names the ranks and their values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from evenspan.topology.degrees import Degrees


def assert_finite(values: Sequence[float], *, what: str) -> None:
    """Every number is finite. Raises AssertionError naming the first one that is not."""
    for place, value in enumerate(values):
        assert math.isfinite(value), f"{what} {place} is {value}"


def assert_close(got: Sequence[float], want: Sequence[float], *, tolerance: float, what: str) -> None:
    """`got` equals `want` entry by entry, within `tolerance` relative to the wanted value (or 1e-12)."""
    assert len(got) == len(want), f"{what}: {len(got)} values, expected {len(want)}"
    for place, (value, target) in enumerate(zip(got, want, strict=True)):
        error = abs(value - target) / max(abs(target), 1e-12)
        assert error <= tolerance, (
            f"{what} {place}: {value!r} is not {target!r}; relative error {error:.2e} > {tolerance:.0e}"
        )


def assert_equal_on_ranks(values: Sequence[Any], *, what: str) -> None:
    """Every rank returned the same value, to the last bit; AssertionError names the ranks that differ."""
    differ = [rank for rank, value in enumerate(values) if value != values[0]]
    assert not differ, f"{what} differs on ranks {differ}: rank 0 has {values[0]!r}, " + ", ".join(
        f"rank {rank} {values[rank]!r}" for rank in differ
    )


def assert_local_length(
    shapes: Sequence[Sequence[int]], *, dim: int, total: int, degree: int, what: str
) -> None:
    """On every rank the tensor of local shape `shapes[rank]` holds total / degree entries along `dim`.

    `degree` is the requested size of the axis that splits it. Raises AssertionError with requested and
    observed degree, so that a layout that is configured but never applied cannot pass.
    """
    for rank, shape in enumerate(shapes):
        observed = total / shape[dim] if shape[dim] else math.inf
        assert shape[dim] * degree == total, (
            f"{what}, rank {rank}: dim {dim} of {tuple(shape)} is {shape[dim]}, expected {total} / {degree}; "
            f"requested degree {degree}, observed {observed:g}"
        )


def assert_same_samples(batches: Sequence[Hashable], *, degrees: Degrees) -> None:
    """Ranks of one data-parallel slot hold the same batch, ranks of different slots different ones.

    `batches[rank]` identifies what the rank read: sample ids, or better a fingerprint of the content. Ranks
    that differ only on `context` or `tensor` share a slot.
    """
    first_of_slot: dict[int, int] = {}
    for rank, batch in enumerate(batches):
        first = first_of_slot.setdefault(degrees.coordinates(rank).dp, rank)
        assert batch == batches[first], (
            f"ranks {first} and {rank} share data slot {degrees.coordinates(rank).dp} "
            f"but read {batches[first]!r} and {batch!r}"
        )
    firsts = list(first_of_slot.values())
    for place, rank in enumerate(firsts):
        for other in firsts[:place]:
            assert batches[rank] != batches[other], (
                f"ranks {other} and {rank} have different data slots but both read {batches[rank]!r}"
            )
