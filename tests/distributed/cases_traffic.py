"""What ranks run for the tests of collectives and of what is saved for backward."""

from __future__ import annotations

import torch
from torch import Tensor

from evenspan.comm.collectives import Loss, gather_tokens, reduce_scatter_tokens, split_tokens
from evenspan.parallel.saved import Regathered
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology


def tensor_group(ctx):
    return build_topology(Degrees(tensor=ctx.world_size), device=ctx.device).tensor_mesh.get_group()


def strides(ctx) -> list[bool]:
    """Whether outputs and gradients are contiguous, for every collective, dim and an input of odd strides."""
    group = tensor_group(ctx)
    out = []
    for dim in (0, 1):
        for function in (
            lambda x, dim: gather_tokens(x, dim=dim, group=group),
            lambda x, dim: reduce_scatter_tokens(x, dim=dim, group=group),
            lambda x, dim: split_tokens(x, dim=dim, group=group, loss=Loss.REPEATED),
        ):
            x = torch.randn(6, 8, 4, 4).transpose(0, 3)[..., ::3].requires_grad_()
            y = function(x, dim)
            (grad,) = torch.autograd.grad(
                y, x, torch.randn_like(y).transpose(0, 1).contiguous().transpose(0, 1)
            )
            out += [y.is_contiguous(), grad.is_contiguous()]
    return out


def _loss(whole: Tensor, kind: str, weight: Tensor) -> Tensor:
    """A loss that saves the whole tensor, or another one that could be taken for it."""
    if kind == "itself":
        return (whole * whole.view(-1).view(whole.shape)).sum()
    if kind == "written to":
        whole = whole.mul_(3)
        return (whole * whole).sum()
    if kind == "read as other numbers":
        return (whole.view(torch.int64).view(torch.float64) * weight).sum()
    if kind == "a part of it":
        return (whole[:, :3] * whole[:, :3]).sum()
    other = whole.detach().clone() * 2
    address = whole.data_ptr()
    del whole
    for _ in range(20):  # the allocator gives freed memory out again
        fresh = other * weight
        if fresh.data_ptr() == address:
            break
    return (fresh * weight.clone().requires_grad_()).sum()


def saved_shards(ctx) -> dict[str, float]:
    """Gradient errors with `save: shard` against without."""
    group = tensor_group(ctx)
    errors = {}
    for kind in ("itself", "written to", "read as other numbers", "a part of it", "its old address"):
        gradients = []
        for save in (False, True):
            torch.manual_seed(ctx.rank)
            shard = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
            weight = torch.randn(2, 8, 8, dtype=torch.float64).requires_grad_()
            whole = gather_tokens(shard, dim=1, group=group)
            if save:
                with Regathered(shard, whole, dim=1, group=group).saving():
                    loss = _loss(whole, kind, weight)
            else:
                loss = _loss(whole, kind, weight)
            del whole
            loss.backward()
            gradients.append([x.grad if x.grad is not None else torch.zeros(()) for x in (shard, weight)])
        errors[kind] = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    return errors
