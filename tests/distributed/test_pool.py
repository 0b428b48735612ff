import pytest

from evenspan.testing import RankFailure, RankPool
from tests.distributed import cases_pool


def test_results_come_back_in_rank_order(world2):
    assert world2.run(cases_pool.ranks_add_up, 5) == [(2, 11), (2, 11)]
    assert world2.run(cases_pool.ranks_add_up, 0) == [(2, 1), (2, 1)]


def test_failure_shows_the_rank_and_the_next_run_works():
    pool = RankPool(2)
    assert pool.run(cases_pool.ranks_add_up, 1) == [(2, 3), (2, 3)]
    with pytest.raises(RankFailure, match=r"rank 0 gave no answer \(limit 1 s"):
        pool.run(cases_pool.sleep, 60, timeout=1)
    with pytest.raises(RankFailure, match=r"1 of 2 ranks failed[\s\S]*rank 1[\s\S]*rank 1 says no"):
        pool.run(cases_pool.raise_on, 1)
    with pytest.raises(RankFailure, match=r"2 of 2 ranks failed[\s\S]*rank 0 says no"):
        pool.run(cases_pool.raise_while_others_wait, 0)
    assert pool.run(cases_pool.ranks_add_up, 1) == [(2, 3), (2, 3)]
    pool.close()
