import pytest

from evenspan.errors import TopologyError
from evenspan.topology.degrees import Degrees, RankCoordinates, divisors


def test_free_axis_takes_what_is_left():
    degrees = Degrees.solve(replicate=1, shard=-1, context=4, tensor=1, world_size=8)
    assert degrees == Degrees(shard=2, context=4)
    assert (degrees.dp, degrees.world_size) == (2, 8)


@pytest.mark.parametrize("axis", ["replicate", "shard", "context", "tensor"])
def test_any_axis_may_be_free(axis):
    wanted = {"replicate": 1, "shard": 1, "context": 1, "tensor": 1, axis: -1}
    assert Degrees.solve(**wanted, world_size=6) == Degrees(**{**wanted, axis: 6})


@pytest.mark.parametrize(
    ("wanted", "world_size", "code", "words"),
    [
        ((-1, -1, 1, 1), 4, "T102", "2 degrees are -1"),
        ((1, -1, 0, 1), 4, "T102", "parallel.mesh.context = 0"),
        ((1, -2, 1, 1), 4, "T102", "parallel.mesh.shard = -2"),
        ((1, -1, 3, 1), 8, "T103", "start 6 or 9 ranks"),
        ((1, -1, 8, 1), 4, "T103", "start 8 ranks"),
        ((1, 2, 2, 1), 8, "T103", "= 4 ranks, but the world has 8"),
    ],
)
def test_degrees_that_do_not_fit_are_named(wanted, world_size, code, words):
    names = ("replicate", "shard", "context", "tensor")
    with pytest.raises(TopologyError, match=words) as raised:
        Degrees.solve(**dict(zip(names, wanted, strict=True)), world_size=world_size)
    assert raised.value.code == code


def test_context_ranks_are_neighbours_and_dp_ranks_strided():
    degrees = Degrees(shard=2, context=2)
    assert degrees.context_groups() == [[0, 1], [2, 3]]
    assert degrees.dp_groups() == [[0, 2], [1, 3]]
    assert Degrees(context=2, tensor=2).context_groups() == [[0, 2], [1, 3]]


def test_coordinates_count_in_mixed_radix():
    degrees = Degrees(replicate=2, shard=2, context=3, tensor=2)
    assert degrees.coordinates(23) == RankCoordinates(replicate=1, shard=1, context=2, tensor=1, dp=3)
    assert degrees.coordinates(7) == RankCoordinates(replicate=0, shard=1, context=0, tensor=1, dp=1)
    seen = {(c.replicate, c.shard, c.context, c.tensor) for c in map(degrees.coordinates, range(24))}
    assert len(seen) == 24
    with pytest.raises(TopologyError, match="rank 24 is outside the world of 24") as raised:
        degrees.coordinates(24)
    assert raised.value.code == "T101"


def test_divisors():
    assert divisors(24) == [1, 2, 3, 4, 6, 8, 12, 24]
