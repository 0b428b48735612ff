"""The tensor axis against one process, fp64: the loss on every rank and the gradient of every parameter."""

from __future__ import annotations

import pytest

from tests.distributed import cases_tensor as cases

TENSOR2 = [
    ({"tensor": 2}, {}, {"fsdp": False}),
    ({"tensor": 2}, {}, {}),
    ({"tensor": 2}, {}, {"sp": False}),
    ({"tensor": 2}, {}, {"sp": False, "fsdp": False, "count": 2}),
    ({"tensor": 2}, {"tied": False, "bias": False}, {"count": 3}),
    ({"tensor": 2}, {"sequence_first": True}, {"count": 2}),
    ({"tensor": 2}, {"sequence_first": True}, {"sp": False}),
    ({"tensor": 2}, {}, {"count": 3, "sync": False}),
    ({"tensor": 2}, {}, {"length": 9, "padding": True, "count": 2}),
    ({"tensor": 2}, {}, {"checkpointing": "full", "count": 2}),
    ({"tensor": 2}, {}, {"checkpointing": "selective"}),
    ({"tensor": 2}, {"sequence_first": True}, {"checkpointing": "full", "length": 7, "padding": True}),
    *[({"tensor": 2}, {}, {"hook": True, "count": count, "fsdp": count != 2}) for count in (1, 2, 3)],
    ({"tensor": 2}, {}, {"hook": True, "count": 2, "sp": False}),
    ({"tensor": 2}, {}, {"hook": True, "count": 2, "zeroed": True}),
    ({"tensor": 2}, {}, {"count": 2, "zeroed": True}),
]
TENSOR4 = [
    ({"tensor": 4}, {}, {"count": 2}),
    ({"tensor": 4}, {}, {"sp": False}),
    ({"tensor": 4}, {"sequence_first": True}, {"length": 10, "padding": True}),
    ({"tensor": 2, "shard": 2}, {}, {"count": 3}),
    ({"tensor": 2, "shard": 2}, {}, {"count": 3, "sync": False, "checkpointing": "full"}),
    ({"tensor": 2, "shard": 2}, {"tied": False}, {"sp": False, "count": 2}),
    ({"tensor": 2, "shard": 2}, {"sequence_first": True}, {"length": 9, "padding": True}),
    ({"tensor": 2, "replicate": 2}, {}, {"count": 2}),
    *[({"tensor": 2, "shard": 2}, {}, {"hook": True, "count": count}) for count in (1, 2, 3)],
    ({"tensor": 2, "shard": 2}, {}, {"hook": True, "count": 3, "sync": False}),
]


def check(results, layouts):
    for rank, errors in enumerate(results):
        for case, found in zip(layouts, errors, strict=True):
            for name, error in found.items():
                limit = 1e-12 if name.startswith("loss") else 1e-10
                assert error <= limit, f"rank {rank}, {case}: {name} is off by {error:.2e}"


def test_two_ranks(world2):
    check(world2.run(cases.parities, TENSOR2), TENSOR2)


def test_four_ranks(world4):
    check(world4.run(cases.parities, TENSOR4), TENSOR4)


@pytest.mark.parametrize("case", [TENSOR2[0]])
def test_the_errors_are_measured(world2, case):
    assert len(world2.run(cases.parities, [case])[0][0]) > 20
