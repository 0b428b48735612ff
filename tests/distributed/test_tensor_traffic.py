"""Collectives, bytes and saved activations of one block on the tensor axis, by our meter and by torch."""

from __future__ import annotations

import pytest

from benchmarks.tensor import BARS, BATCH, TOKENS, WIDTH, of_one_block
from tests.distributed import cases_traffic as cases

CALLS = {  # all-gathers, reduce-scatters, all-reduces of one block, forward and backward
    "tensor parallel": (0, 0, 4),
    "sequence parallel": (4, 4, 0),
    "save: shard": (6, 4, 0),
}
SAVED = {  # units of one hidden state: whole ones, and those of which a rank keeps its part
    "tensor parallel": (6, 12),
    "sequence parallel": (2, 16),
    "save: shard": (0, 18),
    "gather per linear": (5, 16),
}
STATISTICS = 0.04
"""What log-sum-exps and inverse root mean squares take of a unit, at most."""


def check_block(results, plan, ranks):
    for found in results:
        calls = tuple(found[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        whole, part = SAVED[plan]
        assert 0 <= found["saved"] - whole - part / ranks <= STATISTICS
        if plan == "gather per linear":
            assert (calls, found["calls"]) == ((7, 7, 0), 14)
            continue
        assert calls == CALLS[plan]
        assert found["calls"] == sum(calls), "torch counts nothing else"
        metered = tuple(found[f"metered {kind}"] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
        assert metered == calls
        hidden_states = 10 if plan == "save: shard" else 8
        assert found["bytes"] * ranks == hidden_states * WIDTH * BATCH * TOKENS * 4 * (ranks - 1)
        if plan == "sequence parallel":
            assert round(found["saved"], 2) <= BARS[ranks]


@pytest.mark.parametrize("plan", SAVED)
def test_one_block_at_tensor_2(world2, plan):
    check_block(world2.run(of_one_block, plan), plan, 2)


@pytest.mark.parametrize("plan", SAVED)
def test_one_block_at_tensor_4(world4, plan):
    check_block(world4.run(of_one_block, plan), plan, 4)


def test_gathered_tensors_are_contiguous(world2):
    assert world2.run(cases.strides) == [[True] * 12] * 2


def test_a_shard_is_saved_for_its_own_whole_only(world2):
    for errors in world2.run(cases.saved_shards):
        assert errors == dict.fromkeys(errors, 0.0)
