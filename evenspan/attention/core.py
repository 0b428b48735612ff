"""The core of an attention layer, softmax(q k^T) v, as a parameter-free child module.

A model calls `self.core(q, k, v, table)`; context parallelism replaces that child, so state-dict keys never
change.

Legend: B batch, T queries, S keys, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor, nn

from evenspan.attention.dense import attend_dense
from evenspan.attention.segments import attend, attend_segments
from evenspan.attention.spans import SpanTable
from evenspan.errors import AttentionError, nearest


class AttentionCore(nn.Module):
    """Computes [B, T, H, D] from q [B, T, H, D], k and v [B, S, K, D] and a table of T queries x S keys."""

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """The output in q's dtype; a query that sees no key gets exactly 0 and passes no gradient."""
        raise NotImplementedError


class SegmentCore(AttentionCore):
    """The exact executor on any device; on the CPU it holds nothing of size queries x keys."""

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """See `attend_segments`."""
        return attend_segments(q_BTHD, k_BSKD, v_BSKD, table)


class DenseCore(AttentionCore):
    """The boolean-matrix reference: for tests and small inputs."""

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """See `attend_dense`."""
        return attend_dense(q_BTHD, k_BSKD, v_BSKD, table)


class FlexCore(AttentionCore):
    """FlexAttention with a block mask made from the table; CUDA only."""

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """See `attend_flex`."""
        from evenspan.attention.flex import attend_flex

        return attend_flex(q_BTHD, k_BSKD, v_BSKD, table)


class VarlenCore(AttentionCore):
    """Variable-length flash attention, one sequence per set of queries; CUDA only."""

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """See `attend_varlen`."""
        from evenspan.attention.varlen import attend_varlen

        return attend_varlen(q_BTHD, k_BSKD, v_BSKD, table)


class AutoCore(AttentionCore):
    """Segments on the CPU, FlexAttention on CUDA; decided by the tensors of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cuda = FlexCore()
        self.elsewhere = SegmentCore()

    def forward(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> Tensor:
        """The chosen core's output."""
        core = self.on_cuda if q_BTHD.device.type == "cuda" else self.elsewhere
        return core(q_BTHD, k_BSKD, v_BSKD, table)


KINDS = ("auto", "dense", "flex", "segments", "varlen")


def attention_core(kind: str) -> AttentionCore:
    """A core by the name that `parallel.attention` uses: auto, dense, segments, flex or varlen.

    Raises AttentionError A202 for another name.
    """
    match kind:
        case "auto":
            return AutoCore()
        case "dense":
            return DenseCore()
        case "segments":
            return SegmentCore()
        case "flex":
            return FlexCore()
        case "varlen":
            return VarlenCore()
    raise AttentionError(
        "A202",
        f"there is no attention core {kind!r}",
        hint=f"use one of {', '.join(nearest(kind, KINDS) or KINDS)}",
    )


@lru_cache(maxsize=1)
def attention_ops() -> frozenset[torch._ops.OpOverload]:
    """The operators whose outputs a checkpoint policy saves so that no core is computed a second time.

    Of the segment executor that is one operator, of the varlen executor torch's kernel where this torch has
    it. Compiled FlexAttention exposes none: under full checkpointing it is computed again.
    """
    ops = {attend._opoverload}
    try:
        import_module("torch.nn.attention.varlen")  # registers its operators
    except ImportError:
        return frozenset(ops)
    return frozenset({*ops, torch.ops.torch_attn._varlen_attn.default})
