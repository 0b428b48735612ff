"""Any layout computes what one process computes: loss on every rank, gradient of every parameter, fp64."""

from __future__ import annotations

import pytest

from evenspan.testing import RankPool
from tests.distributed.cases_parity import (
    Case,
    Parity,
    parity_of,
    parity_with_detached_values,
    parity_with_local_count,
    parity_with_local_positions,
    parity_with_stale_table,
)

LOSS_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-10


def kinds(context: int, replicate: int = 1) -> dict[str, Case]:
    """Every kind of batch at one layout."""
    layout = {"context": context, "replicate": replicate}
    return {
        "plain": Case(**layout),
        "two samples": Case(**layout, batch=2),
        "padded": Case(**layout, frames=7, padding=True),
        "padded, blocks straddle ranks": Case(**layout, frames=11, frame_per_block=3, padding=True),
        "more ranks than frames need": Case(**layout, frames=5, frame_per_block=4, padding=True),
        "i2v": Case(**layout, i2v=True),
        "unequal valid frames": Case(**layout, batch=2, micro_batches=2, valid=(4, 8, 6, 2)),
        "a rank without valid frames": Case(**layout, valid=(2, 4)),
        "several prompts": Case(**layout, prompts=4),
        "three prompts, no multiple of the degree": Case(**layout, prompts=3),
        "accumulation": Case(**layout, micro_batches=3),
        "accumulation, unequal valid": Case(**layout, micro_batches=3, valid=(8, 2, 6, 4)),
        "full checkpointing": Case(**layout, activation_checkpointing="full"),
        "selective checkpointing": Case(**layout, activation_checkpointing="selective", micro_batches=3),
        "without teacher forcing": Case(**layout, teacher_forcing=False),
        "window and sink": Case(**layout, window=4, sink=1),
        "two backwards": Case(**layout, backwards=2),
    }


def corners(context: int, replicate: int = 1) -> dict[str, Case]:
    """Legal geometry that nobody would choose: every share uneven, empty or larger than the clip."""
    layout = {"context": context, "replicate": replicate}
    padded = {**layout, "padding": True}
    return {
        "three samples": Case(**layout, batch=3, valid=(8, 3, 5)),
        "one frame": Case(**padded, frames=1, frame_per_block=1),
        "one frame without teacher forcing": Case(
            **padded, frames=1, frame_per_block=1, teacher_forcing=False
        ),
        "a block larger than the clip": Case(**padded, frames=3, frame_per_block=8),
        "more ranks than frames": Case(**padded, frames=2, frame_per_block=1, batch=3),
        "a prompt per frame": Case(**padded, frames=7, frame_per_block=1, prompts=7),
        "more prompts than blocks": Case(**padded, frames=5, prompts=9),
        "window, sink and padding": Case(**padded, frames=7, frame_per_block=3, window=3, sink=2),
        "window 0 and a sink larger than the clip": Case(**padded, frames=5, window=0, sink=9),
        "window shorter than a block": Case(**padded, frames=9, frame_per_block=4, window=1),
        "i2v, padding, unequal valid": Case(
            **padded, frames=7, frame_per_block=3, i2v=True, batch=3, valid=(1, 7, 4), micro_batches=2
        ),
        "one replica without a valid frame": Case(**layout, micro_batches=2, valid=(0, 0)),
        "everything at once": Case(
            **padded, frames=7, frame_per_block=3, i2v=True, batch=3, valid=(2, 7, 0), prompts=5, window=3,
            sink=1, activation_checkpointing="full", micro_batches=2, backwards=2,
        ),
    }  # fmt: skip


def assert_parity(results: list[list[Parity]], names: list[str]) -> None:
    faults = [
        f"{name}, rank {rank}: loss {parity.loss_error:.2e}, {parity.worst_name} {parity.worst:.2e}"
        for rank, of_rank in enumerate(results)
        for name, parity in zip(names, of_rank, strict=True)
        if not (parity.loss_error <= LOSS_TOLERANCE and parity.worst <= GRADIENT_TOLERANCE)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks(world2: RankPool, context: int) -> None:
    cases = kinds(context, replicate=2 // context)
    assert_parity(world2.run(parity_of, list(cases.values()), timeout=300), list(cases))


@pytest.mark.parametrize("context", [2, 4])
def test_four_ranks(world4: RankPool, context: int) -> None:
    cases = kinds(context, replicate=4 // context)
    assert_parity(world4.run(parity_of, list(cases.values()), timeout=400), list(cases))


@pytest.mark.parametrize("context", [1, 2])
def test_corners_on_two_ranks(world2: RankPool, context: int) -> None:
    cases = corners(context, replicate=2 // context)
    if context == 2:
        del cases["one replica without a valid frame"]  # the only one: nothing to learn from
    assert_parity(world2.run(parity_of, list(cases.values()), timeout=300), list(cases))


def test_corners_on_four_ranks(world4: RankPool) -> None:
    cases = corners(4)
    del cases["one replica without a valid frame"]
    assert_parity(world4.run(parity_of, list(cases.values()), timeout=400), list(cases))


def test_detached_values_turn_it_red(world2: RankPool) -> None:
    parity = world2.run(parity_with_detached_values, Case(context=2))[0]
    assert parity.loss_error <= LOSS_TOLERANCE, "this mutant leaves the forward alone"
    assert parity.worst > GRADIENT_TOLERANCE


def test_local_positions_turn_it_red(world2: RankPool) -> None:
    assert world2.run(parity_with_local_positions, Case(context=2))[1].worst > GRADIENT_TOLERANCE


def test_missing_count_reduction_turns_it_red(world2: RankPool) -> None:
    parity = world2.run(parity_with_local_count, Case(context=2, valid=(6,)))[0]
    assert parity.worst > GRADIENT_TOLERANCE


def test_stale_table_turns_it_red(world2: RankPool) -> None:
    parity = world2.run(parity_with_stale_table, Case(context=2, frames=8), 6)[0]
    assert parity.worst > GRADIENT_TOLERANCE
