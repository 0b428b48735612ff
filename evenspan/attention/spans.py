"""A span is a rectangle of the attention matrix; a table of disjoint spans is an attention pattern.

Every executor, the work count of a rank and the planner read the same table, so none can disagree about who
attends to whom. This module does not import torch: a launch-time check must answer at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from evenspan.errors import AttentionError


class TokenRange(NamedTuple):
    """A half-open range [start, stop) of tokens."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Span:
    """Queries [q_start, q_stop) see keys [k_start, k_stop).

    A causal span is aligned at its bottom right corner, so that its last query sees all its keys: query
    `q_start + i` sees key `k_start + j` iff `j - (k_tokens - q_tokens) <= i`.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False

    @property
    def q_tokens(self) -> int:
        """Number of queries."""
        return self.q_stop - self.q_start

    @property
    def k_tokens(self) -> int:
        """Number of keys."""
        return self.k_stop - self.k_start

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        if not self.causal:
            return self.q_tokens * self.k_tokens
        rows = min(self.q_tokens, self.k_tokens)  # the rows that see any key are the last ones
        return rows * self.k_tokens - rows * (rows - 1) // 2

    def visible_keys(self, query: int) -> TokenRange:
        """The keys that `query` (a row of this span) sees; empty ranges are possible in causal spans."""
        if not self.causal:
            return TokenRange(self.k_start, self.k_stop)
        hidden = self.q_stop - 1 - query
        return TokenRange(self.k_start, max(self.k_start, self.k_stop - hidden))


@dataclass(frozen=True)
class SpanTable:
    """An attention pattern: disjoint spans over `q_tokens` queries and `k_tokens` keys.

    What no span covers is invisible; a query that sees no key has an output of exactly zero and passes no
    gradient. Spans are kept in order of (query, key). Hashable, so that plans and masks can be cached by
    table.

    Raises AttentionError A101 when a span is empty or out of range, A102 when the rectangles of two spans
    overlap (a causal span counts with its whole rectangle).
    """

    spans: tuple[Span, ...]
    q_tokens: int
    k_tokens: int

    def __post_init__(self) -> None:
        ordered = sorted(self.spans, key=lambda s: (s.q_start, s.k_start, s.q_stop, s.k_stop))
        object.__setattr__(self, "spans", tuple(ordered))
        for span in self.spans:
            _check_range(span, self.q_tokens, self.k_tokens)
        _check_disjoint(self.spans)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.spans, self.q_tokens, self.k_tokens))  # once: long tables are looked up every layer

    @cached_property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs: the work of one head."""
        return sum(span.pairs for span in self.spans)

    @property
    def density(self) -> float:
        """Visible pairs as a share of the whole matrix; 0.0 for an empty matrix."""
        whole = self.q_tokens * self.k_tokens
        return self.pairs / whole if whole else 0.0

    def scaled(self, tokens_per_frame: int) -> SpanTable:
        """The table in tokens, from one in frames: every unit becomes `tokens_per_frame` consecutive tokens.

        Raises AttentionError A104 on causal spans (a causal frame pattern says nothing about the order of
        tokens inside a frame) and A103 when `tokens_per_frame` < 1.
        """
        n = tokens_per_frame
        if n < 1:
            raise AttentionError(
                "A103",
                f"tokens_per_frame={n} is not a positive count",
                hint="pass latent height x width after patching, at least 1",
            )
        if any(span.causal for span in self.spans) and n > 1:
            raise AttentionError(
                "A104",
                f"a table with causal spans cannot be scaled by {n} tokens per frame",
                hint="use block_causal(frames, frame_per_block=1) in frames, or causal(tokens) in tokens",
            )
        spans = (Span(s.q_start * n, s.q_stop * n, s.k_start * n, s.k_stop * n, s.causal) for s in self.spans)
        return SpanTable(tuple(spans), self.q_tokens * n, self.k_tokens * n)

    def merged(self) -> SpanTable:
        """The same pattern in few rectangles: full spans with a common side become one."""
        full = [s for s in self.spans if not s.causal]
        kept = [s for s in self.spans if s.causal]
        while True:
            fewer = _merge_queries(_merge_keys(full))
            if len(fewer) == len(full):
                return SpanTable((*fewer, *kept), self.q_tokens, self.k_tokens)
            full = fewer


def merge_ranges(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """The union of ranges, sorted, with touching and overlapping ranges joined and empty ones dropped."""
    merged: list[TokenRange] = []
    for start, stop in sorted(r for r in ranges if r.start < r.stop):
        if merged and start <= merged[-1].stop:
            merged[-1] = TokenRange(merged[-1].start, max(stop, merged[-1].stop))
        else:
            merged.append(TokenRange(start, stop))
    return tuple(merged)


def _check_range(span: Span, q_tokens: int, k_tokens: int) -> None:
    if 0 <= span.q_start < span.q_stop <= q_tokens and 0 <= span.k_start < span.k_stop <= k_tokens:
        return
    raise AttentionError(
        "A101",
        f"{span} is empty or leaves the table of {q_tokens} queries x {k_tokens} keys",
        hint=f"use 0 <= q_start < q_stop <= {q_tokens} and 0 <= k_start < k_stop <= {k_tokens}",
    )


def _check_disjoint(spans: tuple[Span, ...]) -> None:
    """Sweeps the query axis, keeping the key ranges that are open there sorted."""
    events = [(s.q_stop, 0, s) for s in spans] + [(s.q_start, 1, s) for s in spans]
    active: list[tuple[int, int]] = []
    owner: dict[tuple[int, int], Span] = {}
    for _, opening, span in sorted(events, key=lambda event: event[:2]):
        keys = (span.k_start, span.k_stop)
        if not opening:
            active.pop(bisect_left(active, keys))
            continue
        at = bisect_left(active, keys)
        near = active[max(0, at - 1) : at + 1]
        for start, stop in near:
            if start < span.k_stop and span.k_start < stop:
                raise AttentionError(
                    "A102",
                    f"{owner[start, stop]} and {span} cover the same pairs",
                    hint="a pair may be visible once only: cut one of the two spans at the other's edge",
                )
        insort(active, keys)
        owner[keys] = span


def _merge_keys(spans: list[Span]) -> list[Span]:
    keys_of: dict[TokenRange, list[TokenRange]] = defaultdict(list)
    for s in spans:
        keys_of[TokenRange(s.q_start, s.q_stop)].append(TokenRange(s.k_start, s.k_stop))
    return [Span(*q, *k) for q, keys in keys_of.items() for k in merge_ranges(keys)]


def _merge_queries(spans: list[Span]) -> list[Span]:
    queries_of: dict[TokenRange, list[TokenRange]] = defaultdict(list)
    for s in spans:
        queries_of[TokenRange(s.k_start, s.k_stop)].append(TokenRange(s.q_start, s.q_stop))
    return [Span(*q, *k) for k, queries in queries_of.items() for q in merge_ranges(queries)]
