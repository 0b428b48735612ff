import pytest

from tests.distributed import cases_context as cases
from tests.distributed import toy


def _closed_form(ranks):
    width, kv_width = toy.HEADS * toy.DIM, max(toy.KV_HEADS, ranks) * toy.DIM
    tokens = 2 * toy.FRAMES * toy.TOKENS_PER_FRAME  # clean and noisy
    return toy.BLOCKS * 4 * (width + kv_width) * 2 * tokens * 8 * (ranks - 1) // ranks**2


def _assert_parity(results):
    for result in results:
        assert result["loss"] <= 1e-12, result
        assert result["output"] <= 1e-12, result
        assert result["input_grad"] <= 1e-10, result
        assert len(result["param_grads"]) == 33
        assert {name: e for name, e in result["param_grads"].items() if e > 1e-10} == {}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        ("world2", {"context": 2}),
        ("world4", {"context": 4}),
        ("world4", {"shard": 2, "context": 2}),
        ("world4", {"replicate": 2, "context": 2}),
    ],
)
def test_every_layout_equals_one_process(request, world, degrees, mode):
    results = request.getfixturevalue(world).run(cases.parity, degrees, mode, None)
    _assert_parity(results)
    ranks = degrees["context"]
    for result in results:
        assert result["exchanges"] == (2 * toy.BLOCKS, 2 * toy.BLOCKS), (
            "recomputation must not exchange again"
        )
        assert result["bytes"] == _closed_form(ranks)
        assert [kind for kind, _ in result["traffic"]] == ["exchange"]
        assert result["keys_kept"]


def test_without_context_nothing_is_exchanged(world2):
    results = world2.run(cases.parity, {"shard": 2}, "none", None)
    _assert_parity(results)
    assert all(result["traffic"] == [] for result in results)


@pytest.mark.parametrize("mutant", ["detached_v", "local_positions"])
def test_parity_sees_a_broken_core(world2, mutant):
    results = world2.run(cases.parity, {"context": 2}, "none", mutant)
    with pytest.raises(AssertionError):
        _assert_parity(results)
    if mutant == "detached_v":
        assert all(result["output"] <= 1e-12 for result in results), "the forward cannot show it"


def test_what_backward_recomputes(world2):
    counts = {mode: world2.run(cases.saved_bytes, mode)[0] for mode in ("none", "selective", "full")}
    blocks = toy.BLOCKS
    assert counts["none"] == {
        "evenspan::attend": 0,
        "evenspan::exchange": 2 * blocks,
        "aten::addmm": 0,
        "aten::gelu": 0,
    }
    for mode in ("selective", "full"):
        assert counts[mode]["evenspan::attend"] == 0
        assert counts[mode]["evenspan::exchange"] == 2 * blocks
    assert counts["full"]["aten::addmm"] > counts["selective"]["aten::addmm"] >= blocks
