"""Collectives over tokens with a stated adjoint. None of them writes its input; any strides are accepted.

What a backward must do depends on what the loss is (the difference is a factor P, and silent):

- `Loss.SHARED`: the loss is the sum of every rank's share, and parameter gradients are summed over the ranks.
  This is evenspan's convention: each rank computes the loss of its own tokens.
- `Loss.REPEATED`: every rank computes the same whole loss from gathered tensors, and parameter gradients
  of the split part are summed over the ranks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenspan.comm.meter import active_meter, counting_into, record, size_in_bytes
from evenspan.errors import CommError


class Loss(StrEnum):
    """Where the loss behind a collective's output is computed."""

    SHARED = "shared"
    REPEATED = "repeated"


def all_reduce_sum(x: Tensor, *, group: dist.ProcessGroup | None, loss: Loss = Loss.SHARED) -> Tensor:
    """The sum of every rank's `x`, as a new tensor on every rank.

    Adjoint: the sum of the ranks' gradients for a shared loss, the gradient itself for a repeated one.
    Sends 2 (P-1)/P of the bytes of `x` (ring). None is a group of one: `x` comes back.
    """
    if group is None:
        return x
    return _AllReduceSum.apply(x, group, loss)


def gather_tokens(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None, loss: Loss = Loss.SHARED
) -> Tensor:
    """Every rank's `x` joined along `dim` in rank order: [B, T, ...] -> [B, P*T, ...].

    Adjoint for a shared loss: the summed gradients of this rank's tokens (reduce-scatter); for a repeated
    loss: this rank's part of its own gradient. Sends (P-1) times the bytes of `x`. T is equal on all ranks.
    """
    if group is None:
        return x
    return _GatherTokens.apply(x, dim, group, loss)


def split_tokens(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None, loss: Loss = Loss.SHARED
) -> Tensor:
    """This rank's part of a tensor that all ranks hold alike: [B, P*T, ...] -> [B, T, ...]; sends nothing.

    Adjoint for a shared loss: the gradient in this rank's part and zeros elsewhere, because summing the
    gradients over the ranks completes it; for a repeated loss: all parts gathered, because the computation
    before the split is the same on every rank and its gradients are not summed. Raises X104.
    """
    if group is None:
        return x
    if x.shape[dim] % group.size():
        raise CommError(
            "X104",
            f"{x.shape[dim]} tokens cannot be shared by the {group.size()} ranks of a group",
            hint=f"pad to {-(-x.shape[dim] // group.size()) * group.size()} tokens and mask the padding",
        )
    return _SplitTokens.apply(x, dim, group, loss)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, loss: Loss) -> Tensor:
        ctx.group, ctx.loss, ctx.meter = group, loss, active_meter()
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            return grad, None, None
        with counting_into(ctx.meter):
            return _sum(grad, ctx.group), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, loss: Loss) -> Tensor:
        ctx.dim, ctx.group, ctx.loss, ctx.meter = dim, group, loss, active_meter()
        return _gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            return _own_part(grad, ctx.dim, ctx.group), None, None, None
        with counting_into(ctx.meter):
            return _reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, loss: Loss) -> Tensor:
        ctx.dim, ctx.group, ctx.loss, ctx.meter = dim, group, loss, active_meter()
        return _own_part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            with counting_into(ctx.meter):
                return _gather(grad, ctx.dim, ctx.group), None, None, None
        parts = [torch.zeros_like(grad)] * ctx.group.size()
        parts[ctx.group.rank()] = grad
        return torch.cat(parts, dim=ctx.dim), None, None, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    ranks = group.size()
    record("all_reduce", group=group, bytes_sent=2 * size_in_bytes(total) * (ranks - 1) // ranks)
    return total


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    part = x.detach().movedim(dim, 0).contiguous()
    joined = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    dist.all_gather(list(joined.chunk(group.size())), part, group=group)
    record("all_gather", group=group, bytes_sent=size_in_bytes(part) * (group.size() - 1))
    return joined.movedim(0, dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    whole = x.detach().movedim(dim, 0).contiguous()
    ranks = group.size()
    part = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    dist.reduce_scatter(part, list(whole.chunk(ranks)), group=group)
    record("reduce_scatter", group=group, bytes_sent=size_in_bytes(whole) * (ranks - 1) // ranks)
    return part.movedim(0, dim)


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.detach().chunk(group.size(), dim=dim)[group.rank()].clone()
