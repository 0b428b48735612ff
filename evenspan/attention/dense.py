"""A span table as a boolean matrix, and attention by it: the reference, for tests and small inputs only.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenspan.attention.spans import SpanTable


def dense_mask(table: SpanTable, *, device: torch.device | str = "cpu") -> Tensor:
    """bool [q_tokens, k_tokens], true where a query sees a key."""
    mask = torch.zeros(table.q_tokens, table.k_tokens, dtype=torch.bool, device=device)
    for s in table.spans:
        block = torch.ones(s.q_tokens, s.k_tokens, dtype=torch.bool, device=device)
        mask[s.q_start : s.q_stop, s.k_start : s.k_stop] |= (
            block.tril(s.k_tokens - s.q_tokens) if s.causal else block
        )
    return mask


def attend_dense(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k^T + mask) v as [B, T, H, D], holding the whole matrix; rows without keys are 0."""
    mask = dense_mask(table, device=q_BTHD.device)
    groups = q_BTHD.shape[2] // k_BSKD.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k_BSKD, v_BSKD))
    used_scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k) * used_scale
    empty = ~mask.any(dim=1, keepdim=True)
    # An all-masked row would be a softmax of -inf only, hence NaN: let it see everything, then zero it.
    probabilities = scores_BHTS.masked_fill(~(mask | empty), float("-inf")).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", probabilities.masked_fill(empty, 0.0), v)
