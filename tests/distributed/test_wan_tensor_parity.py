"""The causal Wan on the tensor axis equals one process: loss on every rank, every gradient, in fp64."""

from __future__ import annotations

import pytest

from evenspan.testing import RankFailure, RankPool
from tests.distributed.cases_parity import Case, parity_of
from tests.distributed.cases_wan_tensor import STEPS, drift_without_completion, drifts, parity_without
from tests.distributed.test_training_parity import assert_parity

WEIGHTS_TOLERANCE = 1e-8


def kinds(**layout: object) -> dict[str, Case]:
    """What can be different between batches and settings, at one layout with a tensor axis."""
    sp = {**layout, "sequence_parallel": True}
    padded = {**sp, "padding": True}
    return {
        "plain": Case(**layout),
        "plain, two backwards, accumulation": Case(**layout, backwards=2, micro_batches=2),
        "plain, selective checkpointing": Case(**layout, activation_checkpointing="selective"),
        "sequence parallel": Case(**sp),
        "two backwards": Case(**sp, backwards=2),
        "accumulation, unequal valid": Case(**sp, micro_batches=3, valid=(8, 2, 6, 4)),
        "selective checkpointing, two backwards": Case(
            **sp, activation_checkpointing="selective", backwards=2
        ),
        "full checkpointing": Case(**sp, activation_checkpointing="full"),
        "i2v, prompts": Case(**sp, i2v=True, prompts=3, batch=2),
        "without teacher forcing": Case(**sp, teacher_forcing=False),
        "window and sink": Case(**sp, window=4, sink=1),
        "without a norm before cross-attention": Case(**sp, overrides={"cross_attn_norm": False}),
        "padding": Case(**padded, frames=7, frame_per_block=3),
        "padding without teacher forcing": Case(**padded, frames=5, teacher_forcing=False),
        "everything at once": Case(
            **padded, frames=7, frame_per_block=3, i2v=True, batch=3, valid=(2, 7, 0), prompts=5, window=3,
            sink=1, activation_checkpointing="full", micro_batches=2, backwards=2,
        ),
    }  # fmt: skip


def test_tensor_2(world2: RankPool) -> None:
    cases = kinds(tensor=2)
    assert_parity(world2.run(parity_of, list(cases.values())), list(cases))


@pytest.mark.parametrize(
    "layout",
    [{"context": 2, "tensor": 2}, {"shard": 2, "tensor": 2}, {"tensor": 4}],
    ids=["context 2", "shard 2", "tensor 4"],
)
def test_four_ranks(world4: RankPool, layout: dict[str, int]) -> None:
    cases = kinds(**layout)
    assert_parity(world4.run(parity_of, list(cases.values()), timeout=400), list(cases))


def test_twenty_steps(world4: RankPool) -> None:
    """AdamW with clipping, in place of the gradients alone: weights, norms and the average of weights."""
    cases = {
        "context 2": Case(context=2, tensor=2, sequence_parallel=True),
        "context 2, plain": Case(context=2, tensor=2),
        "shard 2, accumulation": Case(shard=2, tensor=2, sequence_parallel=True, micro_batches=2),
        "replicate 2": Case(replicate=2, tensor=2, sequence_parallel=True),
        "tensor 4": Case(tensor=4, sequence_parallel=True),
    }
    for rank, of_rank in enumerate(world4.run(drifts, list(cases.values()), timeout=400)):
        for name, drift in zip(cases, of_rank, strict=True):
            where = f"{name}, rank {rank}: {drift}"
            assert 0 < drift.clipped < STEPS, "steps with and without clipping"
            assert max(drift.loss, drift.norm) <= 1e-12, where
            assert max(drift.weights, drift.average) <= WEIGHTS_TOLERANCE, where
            assert drift.between_ranks == 0.0, where


def test_a_missing_sum_turns_it_red(world4: RankPool) -> None:
    drift = world4.run(drift_without_completion, Case(shard=2, tensor=2, sequence_parallel=True))[0]
    assert min(drift.norm, drift.weights, drift.between_ranks) > WEIGHTS_TOLERANCE


def test_a_text_gradient_of_own_heads_only_is_caught_at_the_first_step(world2: RankPool) -> None:
    """The mutant leaves the forward alone: only the comparison of gradients between ranks can see it."""
    case = Case(tensor=2, sequence_parallel=True)
    with pytest.raises(RankFailure, match=r"(?s)P119.*text_embedder"):
        world2.run(parity_without, case, "CausalWan", "text_entry")
