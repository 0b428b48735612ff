"""The varlen executor with the kernel written as a loop on the CPU: index lists, ends, alignment, zeros."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch import Tensor

from evenspan.attention import patterns, varlen
from evenspan.attention.dense import attend_dense
from evenspan.attention.spans import Span, SpanTable
from evenspan.errors import AttentionError

TABLES = [
    patterns.teacher_forcing([(0, 8)], frame_per_block=4).scaled(3),
    patterns.teacher_forcing([(0, 3), (3, 6), (6, 9)], frame_per_block=4, valid_frames=8).scaled(2),
    patterns.causal(9),
    patterns.causal(9, window=3, sink=1),
    patterns.documents([3, 1, 5]),
    patterns.full(4, 7),
    SpanTable((Span(1, 4, 2, 9, True),), 6, 10),
    SpanTable((Span(1, 8, 2, 5, True),), 9, 6),
    SpanTable((Span(0, 6, 0, 6, True), Span(3, 9, 6, 8), Span(7, 10, 0, 2)), 10, 8),
    SpanTable((), 4, 5),
]


def loop_kernel(q: Tensor, k: Tensor, v: Tensor, *, ends, batch, scale: float) -> Tensor:
    """What a varlen kernel promises: each sequence on its own, causal aligned at the bottom right."""
    q_ends, k_ends = (end.tolist() for end in ends)
    assert (q_ends[-1], k_ends[-1]) == (len(q), len(k))
    rows = []
    for i in range(len(q_ends) - 1):
        qs, ks, vs = q[q_ends[i] : q_ends[i + 1]], k[k_ends[i] : k_ends[i + 1]], v[k_ends[i] : k_ends[i + 1]]
        assert len(qs) <= batch.max_q
        assert len(ks) <= batch.max_k
        table = SpanTable((Span(0, len(qs), 0, len(ks), batch.causal),), len(qs), len(ks))
        rows.append(attend_dense(qs[None], ks[None], vs[None], table, scale=scale)[0])
    return torch.cat(rows)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gathered_sequences_equal_dense_attention(table: SpanTable, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, table.q_tokens, 2, 4), *[(2, table.k_tokens, kv_heads, 4)] * 2]
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    dout = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    got = varlen.run_batches(*inputs, table, kernel=loop_kernel, scale=0.5)
    expected = attend_dense(*inputs, table, scale=0.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
    if got.requires_grad:  # an empty table gives a constant
        grads = [torch.autograd.grad(x, inputs, dout) for x in (got, expected)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_teacher_forcing_is_one_launch() -> None:
    (batch,) = varlen.varlen_batches(TABLES[0])
    assert not batch.causal
    assert len(batch.q_ends) == 1 + 2 * 2  # two copies of two blocks
    assert sorted(batch.q_index) == list(range(TABLES[0].q_tokens))


def test_two_diagonals_per_query_are_an_error() -> None:
    table = SpanTable((Span(0, 3, 0, 3, True), Span(0, 3, 3, 6, True)), 3, 6)
    with pytest.raises(AttentionError, match="A303 queries \\[0, 3\\)"):
        varlen.varlen_batches(table)


def test_a_missing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "torch.nn.attention.varlen":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    varlen.varlen_kernel.cache_clear()
    with pytest.raises(AttentionError, match="A302") as caught:
        varlen.varlen_kernel()
    assert "flex" in caught.value.hint
