"""Cross entropy of logits that are split over the vocabulary (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from evenspan.comm.collectives import summed

IGNORED = -100
"""The label of a token that carries no loss."""


def vocab_parallel_cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, *, group: dist.ProcessGroup | None
) -> Tensor:
    """The loss of each token [N], in at least fp32, equal on all ranks; 0 where the label is -100.

    `logits_NV` [N, V / ranks] is this rank's contiguous part of the vocabulary, in rank order; `labels_N` [N]
    global token ids. None is a group of one: logits of the whole vocabulary. Sends three numbers a token.
    """
    if group is None:
        wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return functional.cross_entropy(wide, labels_N, ignore_index=IGNORED, reduction="none")
    return _VocabParallelCrossEntropy.apply(logits_NV, labels_N, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide = logits_NV.detach().to(torch.promote_types(logits_NV.dtype, torch.float32))
        peak_N = summed(wide.amax(-1), group, op=dist.ReduceOp.MAX)
        shifted_NV = wide - peak_N[:, None]
        own_N = labels_N - group.rank() * wide.shape[1]
        here_N = (own_N >= 0) & (own_N < wide.shape[1])
        index_N = own_N.masked_fill(~here_N, 0)
        target_N = shifted_NV.gather(1, index_N[:, None])[:, 0].masked_fill(~here_N, 0.0)
        exponentials_NV = shifted_NV.exp()
        both_2N = summed(torch.stack((exponentials_NV.sum(-1), target_N)), group)
        ignored_N = labels_N == IGNORED
        ctx.save_for_backward(exponentials_NV.div_(both_2N[0, :, None]), index_N, here_N, ignored_N)
        ctx.dtype = logits_NV.dtype
        return (both_2N[0].log() - both_2N[1]).masked_fill(ignored_N, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, index_N, here_N, ignored_N = ctx.saved_tensors
        grad_NV = probabilities_NV.clone()
        grad_NV.scatter_add_(1, index_N[:, None], -here_N.to(grad_NV.dtype)[:, None])
        grad_NV *= grad_N.masked_fill(ignored_N, 0.0)[:, None]
        return grad_NV.to(ctx.dtype), None, None
