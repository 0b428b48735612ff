"""How a span table is executed: few dense calls, each on one set of queries and one set of keys.

Pure Python, cached by table. The cost of a flash kernel is that of its dense rectangle, plus a part that
falls with the number of queries per call; so queries that read the same keys share one call (the clean
block b-1 and the noisy block b read the same clean prefix).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from evenspan.attention.spans import Span, SpanTable, TokenRange, merge_ranges

Ranges = tuple[TokenRange, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One dense attention of the queries in `queries` on the keys in `keys` (each concatenated in order).

    causal: the lengths are equal and query i of the call sees its keys 0 .. i.
    """

    queries: Ranges
    keys: Ranges
    causal: bool = False
    fresh_queries: tuple[bool, ...] = ()
    """For every range of queries: no earlier call touched any of it, so its result is stored, not merged."""
    fresh_keys: tuple[bool, ...] = ()
    """The same for every range of keys."""


@lru_cache(maxsize=256)
def schedule(table: SpanTable) -> tuple[Call, ...]:
    """Calls that cover every visible pair of `table` exactly once; a query may be in several calls."""
    full, squares = split_causal(table.spans)
    calls = (*_full_calls(query_classes(full)), *squares)
    queries = _fresh([call.queries for call in calls])
    keys = _fresh([call.keys for call in calls])
    return tuple(
        replace(call, fresh_queries=q, fresh_keys=k) for call, q, k in zip(calls, queries, keys, strict=True)
    )


def query_classes(spans: tuple[Span, ...], *, merge: bool = True) -> dict[Ranges, Ranges]:
    """Full spans as disjoint sets of queries: which keys -> the queries that see exactly these keys.

    merge: join neighbouring stretches of queries; without it every edge of a span stays an edge.
    """
    edges = sorted({edge for s in spans for edge in (s.q_start, s.q_stop)})
    index = {edge: i for i, edge in enumerate(edges)}
    keys_of_piece: dict[int, list[TokenRange]] = defaultdict(list)
    for s in spans:
        for piece in range(index[s.q_start], index[s.q_stop]):
            keys_of_piece[piece].append(TokenRange(s.k_start, s.k_stop))
    queries_of: dict[Ranges, list[TokenRange]] = defaultdict(list)
    for piece in sorted(keys_of_piece):
        queries_of[merge_ranges(keys_of_piece[piece])].append(TokenRange(edges[piece], edges[piece + 1]))
    return {keys: merge_ranges(q) if merge else tuple(q) for keys, q in queries_of.items()}


def split_causal(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], tuple[Call, ...]]:
    """The full part of every span, and the causal squares that remain.

    Kernels align a causal mask at the top left; a span is aligned at the bottom right. Cut into a full
    rectangle and a square the two agree.
    """
    full = [s for s in spans if not s.causal]
    squares = []
    for s in spans:
        if not s.causal:
            continue
        side = min(s.q_tokens, s.k_tokens)  # queries above the square see no key of this span
        keys = TokenRange(s.k_stop - side, s.k_stop)
        if s.k_start < keys.start:
            full.append(Span(s.q_start, s.q_stop, s.k_start, keys.start))
        squares.append(Call((TokenRange(s.q_stop - side, s.q_stop),), (keys,), True))
    return tuple(full), tuple(squares)


def _full_calls(classes: dict[Ranges, Ranges]) -> tuple[Call, ...]:
    """One call per class, except that classes with the same shared keys read those in one call.

    A key is shared when several classes see it; the rest of a class's keys (a noisy block's own) are private.
    """
    shared_keys = _shared(list(classes))
    parts = {keys: _cut(keys, shared_keys) for keys in classes}
    readers: dict[Ranges, list[Ranges]] = defaultdict(list)
    for keys, (shared, _) in parts.items():
        readers[shared].append(keys)
    calls = []
    for shared, members in readers.items():
        if len(members) == 1 or not shared:
            calls += [Call(classes[keys], keys) for keys in members]
            continue
        together = merge_ranges(q for keys in members for q in classes[keys])
        calls.append(Call(together, shared))
        calls += [Call(classes[keys], parts[keys][1]) for keys in members if parts[keys][1]]
    return tuple(calls)


def _fresh(calls: list[Ranges]) -> list[tuple[bool, ...]]:
    """For every range of every call whether it is disjoint from all ranges of earlier calls."""
    touched: Ranges = ()
    fresh = []
    for ranges in calls:
        fresh.append(tuple(not _cut((r,), touched)[0] for r in ranges))
        touched = merge_ranges([*touched, *ranges])
    return fresh


def _shared(key_sets: list[Ranges]) -> Ranges:
    """The keys that lie in two or more of the sets."""
    events = sorted(event for keys in key_sets for a, b in keys for event in ((a, 1), (b, -1)))
    shared = []
    depth = 0
    for (at, step), (following, _) in pairwise(events):
        depth += step
        if depth >= 2:
            shared.append(TokenRange(at, following))
    return merge_ranges(shared)


def _cut(keys: Ranges, by: Ranges) -> tuple[Ranges, Ranges]:
    """`keys` inside and outside of `by`."""
    inside = merge_ranges(
        TokenRange(max(a, c), min(b, d)) for a, b in keys for c, d in by if max(a, c) < min(b, d)
    )
    outside = []
    for a, b in keys:
        at = a
        for c, d in inside:
            if a <= c and d <= b:
                outside.append(TokenRange(at, c))
                at = d
        outside.append(TokenRange(at, b))
    return inside, merge_ranges(outside)
