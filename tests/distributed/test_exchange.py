import pytest
import torch

from tests.distributed import cases_exchange as cases


def test_each_sample_keeps_its_tokens(world2):
    results = world2.run(cases.arange_example)
    q, k, v, round_trip = results[0]
    assert q == [[[0, 1], [4, 5], [16, 17], [20, 21]], [[8, 9], [12, 13], [24, 25], [28, 29]]]
    assert results[1][0] == [[[2, 3], [6, 7], [18, 19], [22, 23]], [[10, 11], [14, 15], [26, 27], [30, 31]]]
    assert k[0][0] == [100, 101]
    assert v[1][3] == [228, 229]
    assert all(result[3] for result in results), round_trip


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "every_second"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 4, 4, 3), (2, 8, 4, 4, 3), (3, 5, 8, 4, 3), (2, 4, 12, 12, 3), (2, 3, 8, 2, 3), (1, 3, 8, 1, 3)],
)
def test_exchange_equals_gather_and_slice(world4, sizes, layout):
    batch, tokens, heads, kv_heads, _ = sizes
    for result in world4.run(cases.against_naive, sizes, layout):
        assert result["values"], result
        assert result["untouched"], result
        assert result["round_trip"], result
        assert result["shapes"][0] == (batch, 4 * tokens, heads // 4, 3)
        assert result["shapes"][1][2] == max(1, kv_heads // 4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1)])
def test_backward_is_the_adjoint(world4, heads, kv_heads):
    for (left, right), (out_left, out_right) in world4.run(cases.adjoint, heads, kv_heads):
        assert left == pytest.approx(right, rel=1e-13)
        assert out_left == pytest.approx(out_right, rel=1e-13)


@pytest.mark.parametrize(("kv_heads", "dtype", "size"), [(8, torch.float32, 4), (2, torch.bfloat16, 2)])
def test_traffic_is_the_closed_form(world4, kv_heads, dtype, size):
    batch, tokens, heads, dim, ranks = 2, 3, 8, 5, 4
    width, kv_width = heads * dim, max(kv_heads, ranks) * dim
    closed_form = 4 * (width + kv_width) * batch * (tokens * ranks) * size * (ranks - 1) // ranks**2
    for counted, calls_after, keys in world4.run(cases.traffic, (batch, tokens, heads, kv_heads, dim), dtype):
        assert counted == (2, 4, closed_form)
        assert calls_after == 4, "an inactive meter counts nothing"
        assert [kind for kind, _ in keys] == ["exchange"]


def test_heads_that_do_not_split_are_refused_on_every_rank(world2, world4):
    for name, message in world2.run(cases.refused, 3, 3):
        assert name == "CommError"
        assert "X101 3 query heads cannot be shared by 2 context ranks" in message
        assert "[1, 3]" in message
    for _, message in world4.run(cases.refused, 12, 3):
        assert "X102 3 key/value heads cannot be shared by 4 context ranks" in message
        assert "[1, 3, 6, 12]" in message


def test_exchanges_stay_in_their_group(world4):
    assert world4.run(cases.subgroups) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_token_collectives_under_both_loss_conventions(world4):
    for result in world4.run(cases.token_collectives):
        assert [name for name, holds in result.items() if not holds] == []
