"""Span tables: validation, counts, scaling, merging."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evenspan.attention.spans import Span, SpanTable, TokenRange, merge_ranges
from evenspan.attention.work import attention_flops, pairs_by_key_range, pairs_by_query_range
from evenspan.errors import AttentionError


def visible(table: SpanTable) -> set[tuple[int, int]]:
    """The pairs by the definition of a span in its docstring."""
    return {
        (q, k)
        for s in table.spans
        for q in range(s.q_start, s.q_stop)
        for k in range(s.k_start, s.k_stop)
        if not s.causal
        or (k - s.k_start) - ((s.k_stop - s.k_start) - (s.q_stop - s.q_start)) <= q - s.q_start
    }


TABLES = [
    SpanTable((), 3, 4),
    SpanTable((Span(0, 3, 1, 4),), 3, 4),
    SpanTable((Span(0, 4, 0, 4, True),), 4, 4),
    SpanTable((Span(1, 3, 0, 5, True),), 4, 5),
    SpanTable((Span(0, 5, 1, 3, True),), 6, 4),
    SpanTable((Span(0, 2, 0, 3, True), Span(2, 6, 0, 2), Span(0, 6, 3, 5)), 6, 5),
]


@pytest.mark.parametrize("table", TABLES)
def test_pairs_and_density_count_visible_pairs(table: SpanTable) -> None:
    assert table.pairs == len(visible(table))
    assert table.density == len(visible(table)) / (table.q_tokens * table.k_tokens)


@pytest.mark.parametrize("table", TABLES)
def test_visible_keys_of_a_row(table: SpanTable) -> None:
    seen = {
        (q, k) for s in table.spans for q in range(s.q_start, s.q_stop) for k in range(*s.visible_keys(q))
    }
    assert seen == visible(table)


@pytest.mark.parametrize("table", TABLES)
def test_work_by_range(table: SpanTable) -> None:
    pairs = visible(table)
    queries = [(a, b) for a in range(table.q_tokens + 1) for b in range(a, table.q_tokens + 1)]
    keys = [(a, b) for a in range(table.k_tokens + 1) for b in range(a, table.k_tokens + 1)]
    by_query = tuple(sum(a <= q < b for q, _ in pairs) for a, b in queries)
    by_key = tuple(sum(a <= k < b for _, k in pairs) for a, b in keys)
    assert pairs_by_query_range(table, queries) == by_query
    assert pairs_by_key_range(table, keys) == by_key


def test_flops_of_full_attention() -> None:
    table = SpanTable((Span(0, 8, 0, 16),), 8, 16)
    assert attention_flops(table, heads=2, head_dim=4) == 2 * (2 * 8 * 16 * 4) * 2


def test_density_of_an_empty_matrix_is_zero() -> None:
    assert SpanTable((), 0, 0).density == 0.0


def test_scaled_multiplies_every_edge() -> None:
    table = SpanTable((Span(0, 1, 0, 2), Span(1, 2, 1, 2)), 2, 2)
    assert table.scaled(3) == SpanTable((Span(0, 3, 0, 6), Span(3, 6, 3, 6)), 6, 6)
    assert table.scaled(1) == table


def test_scaled_refuses_causal_spans() -> None:
    with pytest.raises(AttentionError, match="A104") as caught:
        SpanTable((Span(0, 2, 0, 2, True),), 2, 2).scaled(4)
    assert "block_causal" in caught.value.hint


def test_scaled_refuses_no_tokens() -> None:
    with pytest.raises(AttentionError, match="A103 tokens_per_frame=0"):
        SpanTable((), 2, 2).scaled(0)


def test_merged_is_one_rectangle_where_possible() -> None:
    pieces = (Span(0, 1, 0, 2), Span(0, 1, 2, 4), Span(1, 3, 0, 4), Span(3, 4, 0, 4, True))
    merged = SpanTable(pieces, 4, 4).merged()
    assert merged.spans == (Span(0, 3, 0, 4), Span(3, 4, 0, 4, True))


@pytest.mark.parametrize(
    "span", [Span(0, 0, 0, 1), Span(0, 3, 0, 1), Span(0, 1, 0, 5), Span(-1, 1, 0, 1), Span(1, 0, 0, 1)]
)
def test_a_span_outside_the_table_is_an_error(span: Span) -> None:
    with pytest.raises(AttentionError, match="A101") as caught:
        SpanTable((span,), 2, 4)
    assert "q_stop <= 2" in caught.value.hint


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 2, 0, 2), Span(1, 3, 1, 3)),
        (Span(0, 3, 0, 3), Span(1, 2, 1, 2)),
        (Span(0, 2, 0, 2), Span(0, 2, 0, 2)),
        (Span(0, 2, 0, 1), Span(0, 2, 3, 4), Span(1, 2, 0, 4)),
    ],
)
def test_overlapping_spans_are_an_error(spans: tuple[Span, ...]) -> None:
    with pytest.raises(AttentionError, match="A102"):
        SpanTable(spans, 4, 4)


def test_touching_spans_are_disjoint() -> None:
    SpanTable((Span(0, 2, 0, 2), Span(2, 4, 0, 2), Span(0, 2, 2, 4), Span(2, 4, 2, 4)), 4, 4)


def test_tables_are_values() -> None:
    spans = (Span(0, 1, 0, 1), Span(1, 2, 0, 2))
    a, b = SpanTable(spans, 2, 2), SpanTable(spans[::-1], 2, 2)
    assert a == b
    assert hash(a) == hash(b)
    assert a != SpanTable(spans, 3, 2)


def test_merge_ranges() -> None:
    ranges = [TokenRange(4, 6), TokenRange(0, 2), TokenRange(2, 3), TokenRange(5, 5), TokenRange(5, 9)]
    assert merge_ranges(ranges) == ((0, 3), (4, 9))


def test_patterns_do_not_import_torch() -> None:
    code = (
        "import sys, evenspan.attention.patterns, evenspan.attention.work; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
