from evenspan.comm.fingerprint import compare_fingerprints
from tests.distributed import cases_fingerprint as cases


def test_equal_content_passes_and_groups_are_independent(world4):
    results = world4.run(cases.compare, [b"a", b"a", b"b", b"b"], [(3, 4), (3, 4), (5, 6), (5, 6)])
    assert results == [None] * 4


def test_a_sampler_keyed_by_global_rank_is_named(world4):
    results = world4.run(cases.compare, [b"a", b"a", b"b", b"c"], [(0,), (0,), (1,), (7,)])
    assert results[:2] == [None, None]
    for code, message in results[2:]:
        assert code == "X201"
        assert "ranks [2, 3] share one sequence" in message
        assert "rank 2 read samples [1]" in message
        assert "rank 3 read samples [7]" in message


def test_same_ids_with_other_content_are_caught(world4):
    results = world4.run(cases.compare, [b"a", b"b", b"c", b"c"], [(0,), (0,), (1,), (1,)])
    assert results[0][0] == results[1][0] == "X201"
    assert results[2:] == [None, None]


def test_one_rank_has_nothing_to_compare():
    assert compare_fingerprints(b"a", group=None, sample_ids=[1]) is None
