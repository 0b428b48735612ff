import pytest
import torch

from tests.distributed import cases_fsdp as cases

LAYOUTS = [
    ("world2", {"shard": 2}),
    ("world2", {"context": 2}),
    ("world2", {"replicate": 2}),
    ("world4", {"shard": 2, "context": 2}),
    ("world4", {"replicate": 2, "context": 2}),
    ("world4", {"replicate": 2, "shard": 2}),
]


@pytest.mark.parametrize(("world", "degrees"), LAYOUTS)
def test_gradients_are_sums_and_a_second_backward_adds(request, world, degrees):
    for first, second in request.getfixturevalue(world).run(cases.two_backwards, degrees, {}):
        assert first <= 1e-12
        assert second <= 1e-12


def test_means_instead_of_sums_would_show(world2):
    assert world2.run(cases.averaged) == [pytest.approx(0.5), pytest.approx(0.5)]


@pytest.mark.parametrize("settings", [{"reshard_after_forward": False}, {"cpu_offload": True}])
def test_memory_settings_change_no_number(world2, settings):
    for first, second in world2.run(cases.two_backwards, {"context": 2}, settings):
        assert max(first, second) <= 1e-12


@pytest.mark.parametrize(("world", "degrees"), LAYOUTS)
def test_accumulation_reduces_once(request, world, degrees):
    for early, error in request.getfixturevalue(world).run(cases.accumulation, degrees):
        assert early[:2] == [0, 0], "nothing is reduced before the last micro-step"
        assert early[2] == 33
        assert error <= 1e-12


def test_bf16_computes_in_bf16_and_keeps_fp32_gradients(world2):
    for types, compute, error in world2.run(cases.precision, "bf16"):
        assert types == {torch.float32}
        assert compute == {torch.bfloat16}
        assert error < 0.1


def test_fp32_computes_in_fp32(world2):
    for types, compute, error in world2.run(cases.precision, "fp32"):
        assert types == compute == {torch.float32}
        assert error < 1e-4


def test_state_dict_keys_stay(world2):
    assert world2.run(cases.state_dict_keys) == [True, True]
