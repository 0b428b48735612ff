"""A planned model is copied, wrapped, sharded, evaluated and fails: it stays equal to one process."""

from __future__ import annotations

import pytest

from tests.distributed import cases_life as cases

EXACT = 1e-10
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False])


@BOTH
def test_deep_copies(world2, sequence_parallel):
    for errors in world2.run(cases.copied, sequence_parallel):
        assert max(errors) <= EXACT


def test_a_planned_part_of_another_model(world2):
    assert max(world2.run(cases.wrapped)) <= EXACT


def test_parameters_replaced_after_the_plan(world2):
    assert max(world2.run(cases.sharded_afterwards)) <= EXACT


@BOTH
@pytest.mark.parametrize("where", ["norm", "mlp", "mlp.gate_proj", "mlp.down_proj", "exit"])
def test_exceptions_in_a_forward(world2, sequence_parallel, where):
    for error, weights_back, randomness_back in world2.run(cases.failing, sequence_parallel, where):
        assert error <= EXACT
        assert weights_back
        assert randomness_back


@BOTH
def test_forwards_without_gradients(world2, sequence_parallel):
    for errors in world2.run(cases.evaluated, sequence_parallel):
        assert max(errors) <= EXACT


@BOTH
def test_bf16(world2, sequence_parallel):
    for kinds, error in world2.run(cases.in_bf16, sequence_parallel):
        assert kinds == {"torch.bfloat16"}
        assert error <= 0.1
