"""Weights split over the tensor axis: DTensors under unchanged names, plain tensors while a module runs.

A module's own code multiplies plain tensors. So for the time of its forward the instance attribute `weight`
stands in front of the parameter of that name and holds this rank's part; its gradient reaches the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from evenspan.parallel.plan import Mode
from evenspan.parallel.resolve import PlannedModule, is_transposed


def split_parameters(
    modules: tuple[PlannedModule, ...], model: nn.Module, mesh: DeviceMesh
) -> frozenset[str]:
    """Replace every planned weight by its DTensor over `mesh`; the names of the split parameters.

    Ties, `requires_grad` and state-dict keys stay as they are. Sends nothing: each rank cuts its part out of
    the weight it holds.
    """
    known: dict[nn.Parameter, nn.Parameter] = {}
    for planned in modules:
        for name, dim in planned.split_dims().items():
            whole = planned.module.get_parameter(name)
            if whole not in known:
                part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
                known[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
            planned.module.register_parameter(name, known[whole])
        if planned.split_dims() and is_transposed(planned.module) and planned.split_dims()["weight"] == 1:
            planned.module.nf = planned.module.nf // mesh.size()  # type: ignore[operator, assignment]
        if planned.mode is Mode.WIDTH_NORM and isinstance(planned.module, nn.RMSNorm):
            planned.module.normalized_shape = (planned.module.normalized_shape[-1] // mesh.size(),)
    parts = set(known.values())
    return frozenset(
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in parts
    )


def joined(x: Tensor) -> Tensor:
    """The whole of a tensor, whatever it is sharded over; a collective for a DTensor, `x` itself otherwise.

    One mesh dim at a time, outer first: FSDP2's shards are cut out of the tensor axis' own, so its parts are
    joined before those. The same as `full_tensor`, without its warning about two gathers.
    """
    if not isinstance(x, DTensor):
        return x
    placements = list(x.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def show_local(module: nn.Module, dims: Mapping[str, int]) -> None:
    """Make `module` compute with this rank's parts until `hide_local`."""
    for name, dim in dims.items():
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor):
            module.__dict__[name] = parameter.to_local(grad_placements=[Shard(dim)])


def take_bias(module: nn.Module) -> None:
    """Make a linear module leave its bias out until `hide_local`."""
    bias = module._parameters.get("bias")
    if bias is not None:
        module.__dict__["bias"] = torch.zeros_like(bias) if is_transposed(module) else None


def hide_local(module: nn.Module) -> None:
    """End of `show_local` and `take_bias`: the parameters stand in front again."""
    for name in ("weight", "bias"):
        module.__dict__.pop(name, None)


def local_weight(module: nn.Module) -> Tensor:
    """The part of `weight` that `show_local` shows."""
    weight = module.__dict__["weight"]
    assert isinstance(weight, torch.Tensor)
    return weight
