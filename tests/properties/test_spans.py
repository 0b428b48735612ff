"""Random geometries: the table equals the dense definition and the executor equals dense attention."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenspan.attention.dense import attend_dense, dense_mask
from evenspan.attention.flex import mask_mod
from evenspan.attention.patterns import teacher_forcing
from evenspan.attention.schedule import schedule
from evenspan.attention.segments import attend_segments
from evenspan.attention.spans import Span, SpanTable
from evenspan.attention.work import pairs_by_key_range, pairs_by_query_range


@st.composite
def geometries(draw):
    cuts = draw(st.lists(st.integers(0, 14), max_size=4).map(sorted))
    frames = draw(st.integers(max([0, *cuts]), 16))
    shares = list(zip([0, *cuts], [*cuts, frames], strict=True))
    return shares, {
        "frame_per_block": draw(st.integers(1, 6)),
        "valid_frames": draw(st.integers(0, frames)),
        "window": draw(st.none() | st.integers(0, 8)),
        "sink": draw(st.integers(0, 5)),
    }


@st.composite
def tables(draw):
    """Disjoint spans, full and causal, as cells of a random grid."""
    rows = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=5)))
    columns = sorted(draw(st.sets(st.integers(0, 14), min_size=2, max_size=5)))
    spans = []
    for q in pairwise(rows):
        for k in pairwise(columns):
            kind = draw(st.sampled_from(["none", "full", "full", "causal"]))
            if kind != "none":
                spans.append(Span(*q, *k, kind == "causal"))
    return SpanTable(tuple(spans), 12, 14)


def definition(shares, *, frame_per_block, valid_frames, window, sink) -> Tensor:
    """Masks of clean and noisy copies in frame order, by broadcasting, then put into the ranks' order."""
    frames = shares[-1][1]
    frame = torch.arange(2 * frames) % max(frames, 1)
    noisy = torch.arange(2 * frames) >= frames
    block = frame // frame_per_block
    q, k = slice(None), None
    same = block[q, None] == block[k, q]
    earlier = block[k, q] < block[q, None]
    near = torch.ones_like(same)
    if window is not None:
        near = (frame[k, q] >= block[q, None] * frame_per_block - window) | (frame[k, q] < sink)
    mask = (same & (noisy[q, None] == noisy[k, q])) | (earlier & near & ~noisy[k, q])
    valid = frame < valid_frames
    mask &= valid[q, None] & valid[k, q]
    order = [copy + f for a, b in shares for copy in (0, frames) for f in range(a, b)]
    return mask[order][:, order]


@settings(max_examples=300, deadline=None)
@given(geometries())
def test_teacher_forcing_equals_its_definition(geometry) -> None:
    shares, options = geometry
    assert torch.equal(dense_mask(teacher_forcing(shares, **options)), definition(shares, **options))


@settings(max_examples=200, deadline=None)
@given(tables() | geometries().map(lambda g: teacher_forcing(g[0], **g[1])))
def test_calls_cover_every_pair_once(table: SpanTable) -> None:
    count = torch.zeros(table.q_tokens, table.k_tokens, dtype=torch.int64)
    for call in schedule(table):
        q = torch.cat([torch.arange(*r) for r in call.queries])
        k = torch.cat([torch.arange(*r) for r in call.keys])
        block = torch.ones(len(q), len(k), dtype=torch.int64)
        count[q[:, None], k] += block.tril() if call.causal else block
    assert torch.equal(count, dense_mask(table).long())
    assert table.pairs == count.sum()
    assert torch.equal(dense_mask(table.merged()), dense_mask(table))


@settings(max_examples=100, deadline=None)
@given(tables())
def test_work_and_lookup_agree_with_the_mask(table: SpanTable) -> None:
    mask = dense_mask(table)
    assert pairs_by_query_range(table, [(i, i + 1) for i in range(12)]) == tuple(mask.sum(1).tolist())
    assert pairs_by_key_range(table, [(i, i + 1) for i in range(14)]) == tuple(mask.sum(0).tolist())
    zero = torch.zeros(())
    sees = mask_mod(table, device="cpu")
    assert torch.equal(sees(zero, zero, torch.arange(12)[:, None], torch.arange(14)), mask)


@settings(max_examples=60, deadline=None)
@given(tables() | geometries().map(lambda g: teacher_forcing(g[0], **g[1])), st.integers(0, 2**31))
def test_segments_equal_dense_attention(table: SpanTable, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, 4, dtype=torch.float64, generator=generator).requires_grad_()

    inputs = [draw(table.q_tokens, 2), draw(table.k_tokens, 1), draw(table.k_tokens, 1)]
    dout = draw(table.q_tokens, 2).detach()
    results = []
    for attend in (attend_segments, attend_dense):
        out = attend(*inputs, table)
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
