"""The FlexAttention executor: a block mask made from a span table, for CUDA.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenspan.attention.segments import check_shapes
from evenspan.attention.spans import SpanTable
from evenspan.errors import AttentionError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NEVER, ALWAYS = -(2**30), 2**30


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(table: SpanTable, *, device: torch.device | str) -> MaskMod:
    """FlexAttention's mask function (batch, head, query, key) -> bool, by lookups of the size of the tokens.

    Pieces are the stretches between two span edges; query q sees key k iff k - q <= limit[q's piece, k's
    piece]. A full span's limit is ALWAYS, that of no span NEVER, that of a causal span the distance of its
    bottom right corner from the diagonal.
    """
    q_edges = sorted({0, table.q_tokens} | {e for s in table.spans for e in (s.q_start, s.q_stop)})
    k_edges = sorted({0, table.k_tokens} | {e for s in table.spans for e in (s.k_start, s.k_stop)})
    limit = torch.full((max(1, len(q_edges) - 1), max(1, len(k_edges) - 1)), NEVER, dtype=torch.int32)
    for s in table.spans:
        rows = slice(bisect_left(q_edges, s.q_start), bisect_left(q_edges, s.q_stop))
        columns = slice(bisect_left(k_edges, s.k_start), bisect_left(k_edges, s.k_stop))
        limit[rows, columns] = s.k_stop - s.q_stop if s.causal else ALWAYS
    limits, q_piece, k_piece = (x.to(device) for x in (limit, _pieces(q_edges), _pieces(k_edges)))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return key - query <= limits[q_piece[query], k_piece[key]]

    return sees


def _pieces(edges: list[int]) -> Tensor:
    """For every token the number of the stretch between edges it lies in."""
    lengths = torch.tensor(edges[1:]) - torch.tensor(edges[:-1])
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(torch.int32)


@lru_cache(maxsize=16)
def block_mask(table: SpanTable, device: torch.device) -> BlockMask:
    """FlexAttention's block mask of `table` for all batch entries and heads; cached by table and device."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        mask_mod(table, device=device), None, None, table.q_tokens, table.k_tokens, device=str(device)
    )


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=16)
def empty_queries(table: SpanTable, device: torch.device) -> Tensor | None:
    """bool [T], true for queries that see no key; None when there are none."""
    seen = torch.zeros(table.q_tokens, dtype=torch.bool)
    for s in table.spans:
        hidden = max(0, s.q_tokens - s.k_tokens) if s.causal else 0
        seen[s.q_start + hidden : s.q_stop] = True
    return None if bool(seen.all()) else (~seen).to(device)


def attend_flex(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k^T, over the keys that `table` shows) v as [B, T, H, D], by compiled FlexAttention.

    A query that sees no key gets exactly 0 and passes no gradient. Raises AttentionError A301 when the
    tensors are not on a CUDA device (FlexAttention has no backward on the CPU), A201 when shapes do not
    fit.
    """
    check_shapes(q_BTHD, k_BSKD, v_BSKD, table)
    if q_BTHD.device.type != "cuda":
        raise AttentionError(
            "A301",
            f"the flex core was called with tensors on {q_BTHD.device}; it needs a CUDA device",
            hint="use attention: segments (exact on every device) or attention: auto",
        )
    out = _compiled()(
        q_BTHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        block_mask=block_mask(table, q_BTHD.device),
        scale=scale,
        enable_gqa=q_BTHD.shape[2] != k_BSKD.shape[2],
    ).transpose(1, 2)
    empty = empty_queries(table, q_BTHD.device)
    return out if empty is None else out.masked_fill(empty[:, None, None], 0.0)
