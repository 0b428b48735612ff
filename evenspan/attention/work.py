"""How much attention work falls on which queries and keys, counted from a span table without torch."""

from __future__ import annotations

from collections.abc import Sequence

from evenspan.attention.spans import Span, SpanTable


def pairs_by_query_range(table: SpanTable, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Visible (query, key) pairs whose query lies in each [start, stop) of `ranges` (which may overlap)."""
    return tuple(sum(_pairs_of_queries(span, start, stop) for span in table.spans) for start, stop in ranges)


def pairs_by_key_range(table: SpanTable, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Visible (query, key) pairs whose key lies in each [start, stop) of `ranges` (which may overlap)."""
    return tuple(sum(_pairs_of_keys(span, start, stop) for span in table.spans) for start, stop in ranges)


def attention_flops(table: SpanTable, *, heads: int, head_dim: int) -> int:
    """Floating-point operations of the forward core: 2 products x 2 flops x pairs x heads x head_dim.

    The backward of a flash kernel does 5 products instead of 2: 2.5 times as many.
    """
    return 4 * table.pairs * heads * head_dim


def _pairs_of_queries(span: Span, start: int, stop: int) -> int:
    first, last = max(start, span.q_start), min(stop, span.q_stop)
    if first >= last:
        return 0
    if not span.causal:
        return (last - first) * span.k_tokens
    # Row i of the span sees max(0, k_tokens - (rows below it)) keys: a difference of two triangles.
    return _triangle(span.k_tokens, span.q_stop - first) - _triangle(span.k_tokens, span.q_stop - last)


def _pairs_of_keys(span: Span, start: int, stop: int) -> int:
    first, last = max(start, span.k_start), min(stop, span.k_stop)
    if first >= last:
        return 0
    if not span.causal:
        return (last - first) * span.q_tokens
    # Key j is hidden from the first `j - (k_tokens - q_tokens)` queries.
    lead = span.k_start + span.k_tokens - span.q_tokens
    return sum(span.q_tokens - max(0, key - lead) for key in range(first, last))


def _triangle(keys: int, rows: int) -> int:
    """Pairs of the last `rows` rows of a causal span with `keys` keys."""
    seen = min(rows, keys)
    return seen * keys - seen * (seen - 1) // 2
