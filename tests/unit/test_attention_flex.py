"""The FlexAttention executor, as far as a CPU can show: the mask, the block mask, and the eager forward."""

from __future__ import annotations

import pytest
import torch

from evenspan.attention import flex, patterns
from evenspan.attention.dense import attend_dense, dense_mask
from evenspan.attention.spans import Span, SpanTable

TABLES = [
    patterns.teacher_forcing([(0, 3), (3, 6), (6, 9)], frame_per_block=4, valid_frames=8).scaled(20),
    patterns.causal(200),
    patterns.documents([130, 70]),
    patterns.full(40, 150),
    SpanTable((Span(0, 5, 0, 9, True), Span(2, 9, 9, 12, True), Span(5, 9, 3, 9)), 10, 13),
    SpanTable((), 4, 5),
]


@pytest.mark.parametrize("table", TABLES)
def test_lookup_is_the_mask(table: SpanTable) -> None:
    sees = flex.mask_mod(table, device="cpu")
    zero = torch.zeros((), dtype=torch.int64)
    seen = sees(zero, zero, torch.arange(table.q_tokens)[:, None], torch.arange(table.k_tokens))
    assert torch.equal(seen, dense_mask(table))


@pytest.mark.parametrize("table", TABLES)
def test_empty_queries(table: SpanTable) -> None:
    empty = ~dense_mask(table).any(1)
    got = flex.empty_queries(table, torch.device("cpu"))
    assert not empty.any() if got is None else torch.equal(got, empty)


def test_block_mask_is_cached_and_sparse() -> None:
    table = patterns.teacher_forcing([(0, 8)], frame_per_block=2).scaled(128)
    device = torch.device("cpu")
    block_mask = flex.block_mask(table, device)
    assert flex.block_mask(SpanTable(table.spans, table.q_tokens, table.k_tokens), device) is block_mask
    blocks = block_mask.to_dense()[0, 0].bool()
    expected = dense_mask(table).unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(1).any(-1)
    assert torch.equal(blocks, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_eager_forward_with_the_block_mask() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    table = TABLES[1]
    q, k, v = torch.randn(3, 1, table.q_tokens, 2, 16, generator=torch.Generator().manual_seed(0))
    block_mask = flex.block_mask(table, torch.device("cpu"))
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask)
    torch.testing.assert_close(out.transpose(1, 2), attend_dense(q, k, v, table), rtol=0, atol=1e-5)
