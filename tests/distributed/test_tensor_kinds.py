"""What people's models do, on the tensor axis, equals one process: outputs and every gradient."""

from __future__ import annotations

import pytest

from tests.distributed import cases_kinds as cases
from tests.distributed.kinds_tensor import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(world2, kind):
    for errors in world2.run(cases.all_kinds, [kind]):
        for case, found in errors.items():
            wrong = {name: error for name, error in found.items() if not error <= 1e-10}
            assert len(found) > 5
            assert not wrong, f"{case}: {wrong}"


def test_p119_a_gate_of_features_is_not_replicated(world2):
    for text in world2.run(cases.error_of, "GateTakenForReplicated"):
        assert text.startswith("P119 the gradient of routed.gate.0.weight")
        assert 'as "head_norm" if this rank uses its output' in text


def test_p116_a_parameter_read_without_calling_its_module(world2):
    for text in world2.run(cases.error_of, "ReadOnly"):
        assert text.startswith("P116 aside.weight has a gradient, but its module was never called")


def test_p116_a_tied_weight_inside_and_outside(world2):
    for text in world2.run(cases.error_of, "TiedAcross"):
        assert "inside.weight (tied to outside.weight) worked on shards in one call" in text
