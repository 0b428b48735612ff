"""The dense reference against torch's own attention."""

from __future__ import annotations

import torch

from evenspan.attention import patterns
from evenspan.attention.dense import attend_dense, dense_mask
from evenspan.attention.spans import Span, SpanTable


def test_mask_of_a_bottom_right_aligned_span() -> None:
    table = SpanTable((Span(0, 2, 1, 4, True), Span(2, 3, 0, 1)), 3, 4)
    expected = [[0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]]
    assert dense_mask(table).int().tolist() == expected


def test_equals_torch_with_the_same_mask() -> None:
    table = patterns.teacher_forcing([(0, 3), (3, 6)], frame_per_block=2).scaled(4)
    q, k, v = torch.randn(3, 2, table.q_tokens, 2, 8, dtype=torch.float64)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=dense_mask(table))
    torch.testing.assert_close(attend_dense(q, k, v, table), expected.transpose(1, 2))


def test_rows_without_keys_are_zero_with_zero_gradients() -> None:
    table = SpanTable((Span(0, 2, 0, 2),), 3, 3)
    q, k, v = torch.randn(3, 1, 3, 1, 4, dtype=torch.float64).requires_grad_()
    out = attend_dense(q, k, v, table)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for x in (out, *grads):
        assert torch.count_nonzero(x[:, 2]) == 0
        assert x.isfinite().all()
