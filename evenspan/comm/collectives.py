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

# The names before and since torch 2.13.
_all_gather: Any = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_reduce_scatter_sum: Any = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


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


def copy_to_ranks(x: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """`x`, which all ranks hold alike and each uses for a part of the work; sends nothing.

    Adjoint: the sum of the ranks' gradients (all-reduce), because each rank's part gives only its share.
    """
    if group is None:
        return x
    return _CopyToRanks.apply(x, group)


def divide_gradient(x: Tensor, *, ranks: int) -> Tensor:
    """`x`; its gradient is divided by `ranks`.

    For work that all ranks repeat on a tensor whose gradients will be summed over them.
    """
    return x if ranks == 1 else _DivideGradient.apply(x, ranks)


def gather_tokens(
    x: Tensor,
    *,
    dim: int = 1,
    group: dist.ProcessGroup | None,
    loss: Loss = Loss.SHARED,
    length: int | None = None,
) -> Tensor:
    """Every rank's `x` joined along `dim` in rank order: [B, T, ...] -> [B, P*T, ...].

    T is equal on all ranks. `length` cuts the result to that many tokens: what `split_tokens` padded.
    Adjoint for a shared loss: the summed gradients of this rank's tokens (reduce-scatter); for a repeated
    loss: this rank's part of its own gradient. Padding gets zeros. Sends (P-1) times the bytes of `x`.
    """
    if group is None:
        return x
    return _GatherTokens.apply(x, dim, group, loss, length)


def split_tokens(
    x: Tensor,
    *,
    dim: int = 1,
    group: dist.ProcessGroup | None,
    loss: Loss = Loss.SHARED,
    padding: bool = False,
) -> Tensor:
    """This rank's part of a tensor that all ranks hold alike: [B, P*T, ...] -> [B, T, ...]; sends nothing.

    Adjoint for a shared loss: the gradient in this rank's part and zeros elsewhere, because summing the
    gradients over the ranks completes it; for a repeated loss: all parts gathered, because the computation
    before the split is the same on every rank and its gradients are not summed. With `padding` a length that
    the ranks do not divide is filled up with zeros at its end; otherwise raises X104.
    """
    if group is None:
        return x
    if x.shape[dim] % group.size() and not padding:
        raise _indivisible(x.shape[dim], group)
    return _SplitTokens.apply(x, dim, group, loss)


def reduce_scatter_tokens(
    x: Tensor, *, dim: int = 1, group: dist.ProcessGroup | None, padding: bool = False
) -> Tensor:
    """This rank's tokens of the sum of every rank's `x`: [B, P*T, ...] -> [B, T, ...].

    Adjoint: every rank's gradients joined (all-gather). With `padding` as `split_tokens`; otherwise raises
    X104. Sends (P-1)/P of the bytes of `x`.
    """
    if group is None:
        return x
    if x.shape[dim] % group.size() and not padding:
        raise _indivisible(x.shape[dim], group)
    return _ReduceScatterTokens.apply(x, dim, group)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, loss: Loss) -> Tensor:
        ctx.group, ctx.loss, ctx.meter = group, loss, active_meter()
        return summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            return grad, None, None
        with counting_into(ctx.meter):
            return summed(grad, ctx.group), None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.meter = group, active_meter()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with counting_into(ctx.meter):
            return summed(grad, ctx.group), None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad / ctx.ranks, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (what autograd passes is positional)
        ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, loss: Loss, length: int | None
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.loss, ctx.meter = dim, group, loss, active_meter()
        return gathered(x, dim, group, length=length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            return _own_part(grad, ctx.dim, ctx.group), None, None, None, None
        with counting_into(ctx.meter):
            return _reduce_scatter(grad, ctx.dim, ctx.group), None, None, None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, loss: Loss) -> Tensor:
        ctx.dim, ctx.group, ctx.loss, ctx.meter, ctx.length = dim, group, loss, active_meter(), x.shape[dim]
        return _own_part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.loss is Loss.REPEATED:
            with counting_into(ctx.meter):
                return gathered(grad, ctx.dim, ctx.group, length=ctx.length), None, None, None
        parts = [torch.zeros_like(grad)] * ctx.group.size()
        parts[ctx.group.rank()] = grad
        return torch.cat(parts, dim=ctx.dim).narrow(ctx.dim, 0, ctx.length), None, None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.meter, ctx.length = dim, group, active_meter(), x.shape[dim]
        return _reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with counting_into(ctx.meter):
            return gathered(grad, ctx.dim, ctx.group, length=ctx.length), None, None


def summed(x: Tensor, group: dist.ProcessGroup, *, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Every rank's `x` reduced by `op`, outside autograd; `x` is not written."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=group)
    ranks = group.size()
    record("all_reduce", group=group, bytes_sent=2 * size_in_bytes(total) * (ranks - 1) // ranks)
    return total


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup, *, length: int | None = None) -> Tensor:
    """Every rank's `x` joined along `dim` and cut to `length`, contiguous, outside autograd.

    Contiguous, because each linear that reads a permuted tensor would save a copy of its own for backward.
    """
    part = x.detach().movedim(dim, 0).contiguous()
    joined = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    _all_gather(joined, part, group=group)
    record("all_gather", group=group, bytes_sent=size_in_bytes(part) * (group.size() - 1))
    if length is not None:
        joined = joined[:length]
    return joined.movedim(0, dim).contiguous()


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    whole = _filled_up(x.detach(), dim, ranks).movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    _reduce_scatter_sum(part, whole, group=group)
    record("reduce_scatter", group=group, bytes_sent=size_in_bytes(whole) * (ranks - 1) // ranks)
    return part.movedim(0, dim).contiguous()


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    whole = _filled_up(x.detach(), dim, group.size())
    part = whole.chunk(group.size(), dim=dim)[group.rank()]
    return part.clone(memory_format=torch.contiguous_format)


def _filled_up(x: Tensor, dim: int, ranks: int) -> Tensor:
    """`x` with zeros after its end along `dim`, up to a multiple of `ranks`."""
    missing = -x.shape[dim] % ranks
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim=dim)


def _indivisible(length: int, group: dist.ProcessGroup) -> CommError:
    return CommError(
        "X104",
        f"{length} tokens cannot be shared by the {group.size()} ranks of a group",
        hint=f"pad to {-(-length // group.size()) * group.size()} tokens and mask the padding",
    )
