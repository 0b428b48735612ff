"""Dense attention of one call with its log-sum-exp, forward and backward: torch's fused CPU kernel or math.

Legend: B batch, H query heads, K key/value heads, T tokens, D head dim; tensors of a call are [B, H, T, D].
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def fused_ops() -> tuple[torch._ops.OpOverload, torch._ops.OpOverload] | None:
    """The CPU flash forward and backward that expose the log-sum-exp, or None when this torch lacks them."""
    try:
        aten = torch.ops.aten
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    except AttributeError:  # a private op: another torch may have dropped it
        return None
    return forward, backward


def uses_fused(q_BHTD: Tensor, v_BKTD: Tensor) -> bool:
    """Whether the fused kernel serves these tensors (CPU, floating, equal head dims)."""
    on_cpu = q_BHTD.device.type == "cpu" and q_BHTD.shape[-1] == v_BKTD.shape[-1]
    return on_cpu and fused_ops() is not None


def forward_with_lse(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] and log-sum-exp of the scaled scores [B, H, T]; causal needs equal lengths."""
    ops = fused_ops()
    if ops is not None and uses_fused(q_BHTD, v_BKTD):
        return ops[0](q_BHTD, k_BKTD, v_BKTD, 0.0, causal, scale=scale)
    q, k, v = _grouped(q_BHTD, k_BKTD, v_BKTD)
    scores = _scores(q, k, causal=causal, scale=scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v
    return out.flatten(1, 2).to(q_BHTD.dtype), lse.flatten(1, 2)


def backward_with_lse(
    dout_BHTD: Tensor,
    *,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """This call's part of dq, dk, dv, from the FINAL output and log-sum-exp over all calls.

    With P = exp(S - lse) the probabilities are those of the whole row, so dS = P * (dout v^T -
    rowsum(dout * out)) holds per rectangle and the parts add up (FlashAttention-2, arXiv 2307.08691,
    algorithm 2).
    """
    ops = fused_ops()
    if ops is not None and uses_fused(q_BHTD, v_BKTD):
        return ops[1](dout_BHTD, q_BHTD, k_BKTD, v_BKTD, out_BHTD, lse_BHT, 0.0, causal, scale=scale)
    q, k, v = _grouped(q_BHTD, k_BKTD, v_BKTD)
    kv_heads = k_BKTD.shape[1]
    dout, out = (x.to(q.dtype).unflatten(1, (kv_heads, -1)) for x in (dout_BHTD, out_BHTD))
    lse = lse_BHT.to(q.dtype).unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    p = torch.exp(_scores(q, k, causal=causal, scale=scale) - lse)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dq = (ds @ k).flatten(1, 2)
    dk = (ds.mT @ q).sum(2)
    dv = (p.mT @ dout).sum(2)
    return dq, dk, dv


def _grouped(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, K, H/K, T, D] and k, v [B, K, 1, T, D] in fp32 or higher."""
    dtype = accumulation_dtype(q_BHTD.dtype)
    q = q_BHTD.to(dtype).unflatten(1, (k_BKTD.shape[1], -1))
    return q, k_BKTD.to(dtype).unsqueeze(2), v_BKTD.to(dtype).unsqueeze(2)


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.mT) * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf"))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else adds up in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
