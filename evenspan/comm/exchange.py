"""The Ulysses exchange: tokens split outside attention, heads split inside.

Every rank of a context group of P ranks holds T tokens of all H heads; after `scatter_heads_gather_tokens`
it holds all P*T tokens of H/P heads, and `scatter_tokens_gather_heads` goes back. Both are permutations of
the group's elements, so each is the other's inverse and its adjoint. See DeepSpeed-Ulysses,
arXiv 2309.14509; here q, k and v travel in one all-to-all.

Layout letters: B batch, T local tokens, H heads, D head dim, P ranks.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from evenspan.comm.heads import check_heads
from evenspan.comm.meter import active_meter, counting_into, record, size_in_bytes
from evenspan.errors import CommError

_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
"""Groups by name: an operator takes a string, not a process group."""


@torch.library.custom_op("evenspan::exchange", mutates_args=())
def _exchange(packed_Pn: Tensor, group_name: str) -> Tensor:
    """Row p goes to rank p; row p of the result came from rank p. The result is newly allocated.

    An operator of its own, so that activation checkpointing can keep its output instead of repeating it.
    """
    group = _GROUPS[group_name]
    received_Pn = torch.empty_like(packed_Pn)
    dist.all_to_all_single(received_Pn, packed_Pn, group=group)
    ranks = group.size()
    record("exchange", group=group, bytes_sent=size_in_bytes(packed_Pn) * (ranks - 1) // ranks)
    return received_Pn


@_exchange.register_fake
def _(packed_Pn: Tensor, group_name: str) -> Tensor:  # noqa: ARG001  the signature is the operator's
    return torch.empty_like(packed_Pn)


def scatter_heads_gather_tokens(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, *, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, Hq, D] -> [B, P*T, Hq/P, D], and k, v likewise, in ONE all-to-all; tokens in rank order.

    T must be the same on all ranks. With fewer KV heads than ranks each is copied to P/Hkv ranks, whose
    gradients are summed. Any strides and any B are accepted; no input is written. None is a group of one:
    the inputs come back. Sends (Hq + 2*max(Hkv, P)) * B*T*D elements * (P-1)/P.
    Adjoint: `scatter_tokens_gather_heads` of the three gradients. Raises X101, X102, X103.
    """
    if group is None:
        return q_BTHD, k_BTHD, v_BTHD
    ranks = group.size()
    _check_shapes(q_BTHD, k_BTHD, v_BTHD)
    check_heads(q_BTHD.shape[2], kv_heads=k_BTHD.shape[2], ranks=ranks)
    copies = max(1, ranks // k_BTHD.shape[2])
    if copies > 1:
        k_BTHD, v_BTHD = (kv.repeat_interleave(copies, dim=2) for kv in (k_BTHD, v_BTHD))
    q, k, v = _HeadsToTokens.apply(group, q_BTHD, k_BTHD, v_BTHD)
    return q, k, v


def scatter_tokens_gather_heads(out_BTHD: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """[B, P*T, H/P, D] -> [B, T, H, D] in ONE all-to-all: the way back. None returns the input.

    Sends B*T*H*D elements * (P-1)/P. Adjoint: `scatter_heads_gather_tokens`. Raises X104.
    """
    if group is None:
        return out_BTHD
    tokens, ranks = out_BTHD.shape[1], group.size()
    if tokens % ranks:
        raise CommError(
            "X104",
            f"{tokens} tokens cannot be shared by the {ranks} ranks of a context group",
            hint=f"give every rank the same number of tokens, {ranks} x T in all",
        )
    (out,) = _TokensToHeads.apply(group, out_BTHD)
    return out


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        _remember(ctx, group)
        return _heads_to_tokens(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with counting_into(ctx.meter):
            return None, *_tokens_to_heads(grads, ctx.group)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        _remember(ctx, group)
        return _tokens_to_heads(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with counting_into(ctx.meter):
            return None, *_heads_to_tokens(grads, ctx.group)


def _remember(ctx: FunctionCtx, group: dist.ProcessGroup) -> None:
    ctx.group = group  # type: ignore[attr-defined]
    ctx.meter = active_meter()  # type: ignore[attr-defined]


def _heads_to_tokens(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[B, T, H, D] each -> [B, P*T, H/P, D] each; views of one buffer when B is 1."""
    ranks = group.size()
    by_rank = [x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4) for x in tensors]
    received_PBTHD = _send(torch.cat(by_rank, dim=3), group)
    gathered_BTHD = received_PBTHD.transpose(0, 1).flatten(1, 2)
    return gathered_BTHD.split([x.shape[2] // ranks for x in tensors], dim=2)


def _tokens_to_heads(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """[B, P*T, H/P, D] each -> [B, T, H, D] each."""
    by_rank = [x.unflatten(1, (group.size(), -1)).transpose(0, 1) for x in tensors]
    received_PBTHD = _send(torch.cat(by_rank, dim=3), group)
    parts = received_PBTHD.split([x.shape[2] for x in tensors], dim=3)
    return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in parts)


def _send(packed_PBTHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges along the first dim; `packed` is contiguous when `cat` made it from several strides."""
    _GROUPS[group.group_name] = group
    packed_Pn = packed_PBTHD.contiguous().flatten(1)
    received_Pn = torch.ops.evenspan.exchange(packed_Pn, group.group_name)
    return received_Pn.unflatten(1, packed_PBTHD.shape[1:])


def _check_shapes(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
    q, k, v = (tuple(x.shape) for x in (q_BTHD, k_BTHD, v_BTHD))
    if len(q) == len(k) == 4 and k == v and (q[:2], q[3]) == (k[:2], k[3]) and q_BTHD.dtype == k_BTHD.dtype:
        return
    raise CommError(
        "X103",
        f"q {q} {q_BTHD.dtype}, k {k} {k_BTHD.dtype} and v {v} cannot travel in one exchange",
        hint="give q, k and v as [B, T, H, D] with equal B, T, D and dtype, and k, v with equal H",
    )
