"""Dropout on the tensor axis: other masks on other shards, the same on replicas, the same when recomputed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed import cases_dropout as cases

BLOCKS, FORWARDS = 2, 2
OUTSIDE = ("before", "after")


def same(one, other):
    return one.shape == other.shape and np.array_equal(one, other)


@pytest.mark.parametrize("order", ["in turns", "together", "one after the other", "an evaluation between"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "torch"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_masks(world2, sequence_parallel, checkpointing, order):
    if checkpointing == "none" and order != "in turns":
        pytest.skip("nothing is recomputed")
    results = world2.run(cases.dropping, sequence_parallel, checkpointing, order)
    one, two = results
    assert same(one["random"], two["random"]), "the common stream goes on alike on all ranks"
    for place in cases.PLACES:
        equal_on_ranks = place in (*OUTSIDE, "replicated") or (place == "shards" and not sequence_parallel)
        drawn = []
        for mine, theirs in zip(one["masks"][place], two["masks"][place], strict=True):
            again = checkpointing != "none" and place not in OUTSIDE
            forwards = [mask for mask in mine if mask.any() and not mask.all()]
            assert len(forwards) == FORWARDS * (1 + again), "a mask a forward, and again if recomputed"
            distinct = {mask.tobytes() for mask in forwards}
            assert len(distinct) == FORWARDS, f"{place}: recomputed masks are those of the forward"
            drawn += distinct
            for a, b in zip(mine, theirs, strict=True):
                assert same(a, b) == equal_on_ranks or a.all(), place
        assert len(set(drawn)) == len(drawn), f"{place}: every module and forward draws anew"


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_recomputation_changes_no_gradient(world2, sequence_parallel):
    plain = world2.run(cases.dropping, sequence_parallel, "none", "in turns")
    for checkpointing in ("selective", "full", "torch"):
        for expected, found in zip(
            plain, world2.run(cases.dropping, sequence_parallel, checkpointing, "in turns"), strict=True
        ):
            assert same(expected["random"], found["random"])
            for name, gradient in expected["gradients"].items():
                np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-10, atol=1e-12)
