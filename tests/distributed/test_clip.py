import math

import pytest

from tests.distributed import cases_fsdp as cases
from tests.distributed.test_fsdp import LAYOUTS


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize(("world", "degrees"), LAYOUTS)
def test_clipping_equals_one_process(request, world, degrees, max_norm):
    for norm, want, after, error, naive in request.getfixturevalue(world).run(
        cases.clipping, degrees, max_norm
    ):
        assert norm == pytest.approx(want, rel=1e-12)
        assert after == pytest.approx(min(max_norm, want), rel=1e-5)
        assert error <= 1e-12
        if degrees != {"replicate": 2}:
            assert not math.isclose(naive, want, rel_tol=1e-3), "local squares alone must be visibly wrong"


def test_a_nan_on_one_rank_is_seen_by_all(world2):
    assert world2.run(cases.unsynced_norm_of_nan) == [False, False]
