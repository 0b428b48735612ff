"""The varlen executor: each set of queries with its keys gathered is one sequence of flash attention.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D head dim; t, s gathered queries and
keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from evenspan.attention.schedule import Call, query_classes, split_causal
from evenspan.attention.segments import check_shapes
from evenspan.attention.spans import Span, SpanTable, TokenRange, merge_ranges
from evenspan.errors import AttentionError


@dataclass(frozen=True)
class Batch:
    """Sequences of one launch: which tokens they gather, and where each sequence ends.

    causal: aligned at the bottom right of every sequence, as the kernels align it.
    """

    q_index: tuple[int, ...]
    k_index: tuple[int, ...]
    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    max_q: int
    max_k: int
    causal: bool


class VarlenKernel(Protocol):
    """Attention of one launch on gathered q [t, H, D], k, v [s, K, D], as [t, H, D]."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, ends: tuple[Tensor, Tensor], batch: Batch, scale: float
    ) -> Tensor: ...


@lru_cache(maxsize=64)
def varlen_batches(table: SpanTable) -> tuple[Batch, ...]:
    """At most two launches: the sequences that see all their keys, and those that end in a causal square.

    Every query is in at most one sequence, so no merge follows. Raises AttentionError A303 when two causal
    spans share a query: one sequence has one diagonal.
    """
    full, squares = _cut_squares(table)
    diagonal: dict[TokenRange, TokenRange] = {}
    for square in squares:
        queries = square.queries[0]
        if queries in diagonal:
            raise AttentionError(
                "A303",
                f"queries [{queries.start}, {queries.stop}) lie in two causal spans",
                hint="use attention: segments or flex, which allow several diagonals per query",
            )
        diagonal[queries] = square.keys[0]
    plain, causal = [], []
    for queries, keys in _pieces(full, diagonal):
        if queries in diagonal:
            causal.append(Call((queries,), (*keys, diagonal[queries]), True))
        elif keys:
            plain.append((keys, queries))
    joined: dict[tuple[TokenRange, ...], list[TokenRange]] = {}
    for keys, queries in plain:
        joined.setdefault(keys, []).append(queries)
    calls = [Call(merge_ranges(queries), keys) for keys, queries in joined.items()]
    return tuple(_batch(group, causal=flag) for group, flag in ((calls, False), (causal, True)) if group)


def _cut_squares(table: SpanTable) -> tuple[tuple[Span, ...], list[Call]]:
    """The table as full spans and causal squares, squares cut at every edge of the query axis."""
    full, squares = split_causal(table.spans)
    edges = sorted(
        {e for s in full for e in (s.q_start, s.q_stop)} | {e for c in squares for e in c.queries[0]}
    )
    rectangles, pieces = list(full), []
    for square in squares:
        (queries,), (keys,) = square.queries, square.keys
        inner = [e for e in edges if queries.start <= e <= queries.stop]
        for start, stop in pairwise(inner):
            shift = keys.start - queries.start
            if start > queries.start:
                rectangles.append(Span(start, stop, keys.start, start + shift))
            pieces.append(Call((TokenRange(start, stop),), (TokenRange(start + shift, stop + shift),), True))
    return tuple(rectangles), pieces


def _pieces(
    full: tuple[Span, ...], diagonal: Iterable[TokenRange]
) -> Iterator[tuple[TokenRange, tuple[TokenRange, ...]]]:
    """Every stretch of queries between edges, with the keys all of it sees outside its square."""
    keys_of = {r: keys for keys, queries in query_classes(full, merge=False).items() for r in queries}
    for queries in sorted({*keys_of, *diagonal}):
        yield queries, keys_of.get(queries, ())


def _batch(calls: list[Call], *, causal: bool) -> Batch:
    q_lengths = [sum(b - a for a, b in c.queries) for c in calls]
    k_lengths = [sum(b - a for a, b in c.keys) for c in calls]
    return Batch(
        q_index=tuple(i for c in calls for a, b in c.queries for i in range(a, b)),
        k_index=tuple(i for c in calls for a, b in c.keys for i in range(a, b)),
        q_ends=(0, *accumulate(q_lengths)),
        k_ends=(0, *accumulate(k_lengths)),
        max_q=max(q_lengths),
        max_k=max(k_lengths),
        causal=causal,
    )


@lru_cache(maxsize=1)
def varlen_kernel() -> VarlenKernel:
    """Torch's variable-length attention, else flash_attn's; AttentionError A302 without both."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _flash_attn_kernel()

    def run(
        q: Tensor, k: Tensor, v: Tensor, *, ends: tuple[Tensor, Tensor], batch: Batch, scale: float
    ) -> Tensor:
        window = (-1, 0) if batch.causal else (-1, -1)
        grouped = q.shape[1] != k.shape[1]
        sizes = (*ends, batch.max_q, batch.max_k)
        out = varlen_attn(q, k, v, *sizes, scale=scale, window_size=window, enable_gqa=grouped)
        assert isinstance(out, Tensor), "a tuple comes back only when auxiliary outputs are asked for"
        return out

    return run


def _flash_attn_kernel() -> VarlenKernel:
    try:
        flash_attn = import_module("flash_attn")
    except ImportError as error:
        raise AttentionError(
            "A302",
            f"torch {torch.__version__} has no torch.nn.attention.varlen and flash_attn is not installed",
            hint="install torch >= 2.11 or flash_attn, or use attention: flex",
        ) from error

    def run(
        q: Tensor, k: Tensor, v: Tensor, *, ends: tuple[Tensor, Tensor], batch: Batch, scale: float
    ) -> Tensor:
        sizes = (*ends, batch.max_q, batch.max_k)
        return flash_attn.flash_attn_varlen_func(q, k, v, *sizes, softmax_scale=scale, causal=batch.causal)

    return run


@lru_cache(maxsize=16)
def _indices(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_rows, k_rows = (torch.tensor(x, device=device) for x in (batch.q_index, batch.k_index))
    q_ends, k_ends = (torch.tensor(x, device=device, dtype=torch.int32) for x in (batch.q_ends, batch.k_ends))
    return q_rows, k_rows, q_ends, k_ends


def attend_varlen(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k^T, over the keys that `table` shows) v as [B, T, H, D], by variable-length flash.

    A query that sees no key gets exactly 0 and passes no gradient. Batch entries run one after the other.
    Raises AttentionError A301 off CUDA, A302 without a kernel, A303 on tables with two diagonals per query,
    A201 on shapes.
    """
    check_shapes(q_BTHD, k_BSKD, v_BSKD, table)
    if q_BTHD.device.type != "cuda":
        raise AttentionError(
            "A301",
            f"the varlen core was called with tensors on {q_BTHD.device}; it needs a CUDA device",
            hint="use attention: segments (exact on every device) or attention: auto",
        )
    used_scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    return run_batches(q_BTHD, k_BSKD, v_BSKD, table, kernel=varlen_kernel(), scale=used_scale)


def run_batches(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    table: SpanTable,
    *,
    kernel: VarlenKernel,
    scale: float,
) -> Tensor:
    """Gathers every batch of `varlen_batches`, runs `kernel` on it and puts the rows back; any device."""
    rows = []
    for q_THD, k_SKD, v_SKD in zip(q_BTHD, k_BSKD, v_BSKD, strict=True):
        out_THD = torch.zeros_like(q_THD)
        for batch in varlen_batches(table):
            q_index, k_index, *ends = _indices(batch, q_THD.device)
            part = kernel(
                q_THD[q_index],
                k_SKD[k_index],
                v_SKD[k_index],
                ends=(ends[0], ends[1]),
                batch=batch,
                scale=scale,
            )
            out_THD = out_THD.index_copy(0, q_index, part)
        rows.append(out_THD)
    return torch.stack(rows)
