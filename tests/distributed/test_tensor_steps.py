"""Twenty AdamW steps with clipping on the tensor axis: norms and weights are those of one process."""

from __future__ import annotations

import pytest

from evenspan.testing import RankPool
from tests.distributed import cases_tensor_steps as cases


def check(results):
    for worst_norm, errors in results:
        assert worst_norm <= 1e-9
        assert len(errors) > 20
        assert {name: error for name, error in errors.items() if not error <= 1e-9} == {}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("options", [{}, {"tied": False, "bias": False}])
def test_two_ranks(world2, options, sequence_parallel):
    check(world2.run(cases.training, {"tensor": 2}, options, sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("degrees", [{"tensor": 4}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}])
def test_four_ranks(world4, degrees, sequence_parallel):
    check(world4.run(cases.training, degrees, {}, sequence_parallel))


@pytest.mark.slow
def test_eight_ranks():
    pool = RankPool(8)
    check(pool.run(cases.training, {"replicate": 2, "shard": 2, "tensor": 2}, {}, True))
    pool.close()
