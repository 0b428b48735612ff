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
