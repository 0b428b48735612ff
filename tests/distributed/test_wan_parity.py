import pytest

from tests.distributed import cases_wan as cases


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("world", "frame_per_block"), [("world2", 3), ("world4", 3), ("world4", 2)])
def test_every_gradient_equals_one_process(request, world, frame_per_block, mode):
    """On 4 ranks 6 frames are padded to 8, and blocks straddle ranks."""
    pool = request.getfixturevalue(world)
    for errors, exchanges, layers in pool.run(cases.parity, frame_per_block, mode, "fp64"):
        assert {name: error for name, error in errors.items() if error > 1e-10} == {}
        assert exchanges == 4 * layers


def test_bf16_runs_and_is_close(world2):
    for errors, exchanges, layers in world2.run(cases.parity, 3, "full", "bf16"):
        assert exchanges == 4 * layers
        assert sorted(errors.values())[len(errors) // 2] < 0.1, errors
