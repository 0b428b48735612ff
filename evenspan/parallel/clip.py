"""Gradient clipping by the norm of the whole model, whatever meshes its gradients are sharded over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

_MeshAndPlacements = tuple[DeviceMesh, tuple[Placement, ...]]


def clip_grad_norm(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
    """The 2-norm of all gradients before clipping (0-dim float64, equal on all ranks); scales them in place.

    Equals the norm one process would see: sharded gradients are summed over their shards, replicated ones
    counted once. A collective. `max_norm=inf` only measures. The norm of non-finite gradients is not
    finite and the caller decides; they are not repaired.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    total = torch.sqrt(_squared_norm(gradients))
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(scale.to(device=local.device, dtype=local.dtype))
    return total


def _squared_norm(gradients: list[Tensor]) -> Tensor:
    """One all-reduce per sharded mesh axis and kind of placement."""
    whole: list[Tensor] = []
    sharded: defaultdict[_MeshAndPlacements, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            complete = _without_partial(gradient)
            sharded[complete.device_mesh, tuple(complete.placements)].append(complete.to_local())
        else:
            whole.append(gradient)
    sums = [_sum_of_squares(whole)] if whole else []
    for (mesh, placements), locals_ in sharded.items():
        partial_sum = _sum_of_squares(locals_)
        for mesh_dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(partial_sum, group=mesh.get_group(mesh_dim))
        sums.append(partial_sum)
    return torch.stack(sums).sum()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double()
        for x in tensors
    ]
    return torch.stack(norms).square().sum()


def _without_partial(gradient: DTensor) -> DTensor:
    """Partial sums added up: the square of a sum is not the sum of the squares."""
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    if list(gradient.placements) == placements:
        return gradient
    return gradient.redistribute(placements=placements)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
