import pytest

from evenspan.comm.fingerprint import compare_fingerprints
from tests.distributed import cases_fingerprint as cases

PAIRS = {"shard": 2, "context": 2}
SQUARE = {"context": 2, "tensor": 2}


def test_equal_content_passes_and_groups_are_independent(world4):
    results = world4.run(cases.compare, PAIRS, [b"a", b"a", b"b", b"b"], [(3, 4), (3, 4), (5, 6), (5, 6)])
    assert results == [None] * 4


def test_a_sampler_keyed_by_global_rank_is_named(world4):
    results = world4.run(cases.compare, PAIRS, [b"a", b"a", b"b", b"c"], [(0,), (0,), (1,), (7,)])
    assert results[:2] == [None, None]
    for code, message, _ in results[2:]:
        assert code == "X201"
        assert "ranks [2, 3] share one sequence" in message
        assert "rank 2 read samples [1]" in message
        assert "rank 3 read samples [7]" in message


def test_same_ids_with_other_content_are_caught(world4):
    results = world4.run(cases.compare, PAIRS, [b"a", b"b", b"c", b"c"], [(0,), (0,), (1,), (1,)])
    assert results[0][0] == results[1][0] == "X201"
    assert results[2:] == [None, None]


@pytest.mark.parametrize("odd", range(4))
def test_both_axes_are_one_guard(world4, odd):
    digests = [b"b" if rank == odd else b"a" for rank in range(4)]
    results = world4.run(cases.compare, SQUARE, digests, [(rank,) for rank in (5, 5, 5, 5)])
    for code, message, seconds in results:
        assert code == "X201"
        assert "ranks [0, 1, 2, 3] share one sequence" in message
        assert f"look at ranks [{odd}] first" in message
        assert seconds < 60, "a rank that is right must not wait for one that has raised"
    assert world4.run(cases.compare, SQUARE, [b"a"] * 4, [(5,)] * 4) == [None] * 4


def test_one_rank_has_nothing_to_compare():
    assert compare_fingerprints(b"a", groups=[None, None], sample_ids=[1]) is None


def test_an_own_loader_reads_by_slot(world4):
    read = world4.run(cases.own_loader, {"shard": 2, "tensor": 2})
    assert read[0] == read[1]
    assert read[2] == read[3]
    for one, two in zip(read[0][:5], read[2][:5], strict=True):
        assert not set(one) & set(two)
    row = [sample for one, two in zip(read[0], read[2], strict=True) for sample in (*one, *two)]
    assert sorted(row[:23]) == list(range(23)), "one epoch"
    assert len(set(row[23:])) == len(row) - 23, "and the start of the next"


def test_an_own_loader_that_takes_the_global_rank_is_stopped(world4):
    results = world4.run(cases.own_loader, {"shard": 2, "tensor": 2}, "global rank")
    assert [code for code, _ in results] == ["X201"] * 4
    assert "ranks [2, 3] share one sequence but read different content" in results[2][1]


def test_an_own_loader_that_ignores_ranks_is_stopped(world4):
    results = world4.run(cases.own_loader, {"shard": 2, "tensor": 2}, "no rank")
    assert [code for code, _ in results] == ["X202"] * 4
    assert "by ranks [1, 3]" in results[3][1]


def test_other_content_under_the_same_ids_is_stopped(world4):
    results = world4.run(cases.own_loader, {"replicate": 1, "context": 2, "tensor": 2}, "other content")
    assert [code for code, _ in results] == ["X201"] * 4
    assert "look at ranks [3] first" in results[0][1]
