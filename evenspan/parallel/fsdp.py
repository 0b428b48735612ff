"""FSDP2 with summed gradients: parameters sharded over shard x context, replicated over `replicate`.

The loss is already divided by the global count, so gradients are SUMS over every rank; FSDP2's default
mean would make them 1/ranks too small. Sums are forced: gloo has no pre-multiplied sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from evenspan.errors import TopologyError
from evenspan.topology.mesh import Topology

Precision = Literal["fp32", "bf16", "fp64"]


def shard_model(
    model: nn.Module,
    topology: Topology,
    *,
    blocks: Iterable[nn.Module],
    mixed_precision: Precision,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    fp32_modules: Iterable[nn.Module] = (),
) -> None:
    """Shards each block and then the root, in place; parameters become DTensors under unchanged names.

    `fp32`, `fp64`: parameters, compute and reduction in that type. `bf16`: fp32 parameters, bf16 compute,
    fp32 reduction; inputs are not cast (sigmas and timesteps keep their bits: the model casts what it
    multiplies), and `fp32_modules` compute in fp32. Without a process group only the type is set;
    T301 for bf16 there.
    """
    model.to(torch.float64 if mixed_precision == "fp64" else torch.float32)
    if topology.fsdp_mesh is None:
        if mixed_precision == "bf16":
            raise TopologyError(
                "T301",
                "parallel.mixed_precision: bf16 needs a process group, because FSDP2 does the casting",
                hint="call init_distributed first; it works for a single process too",
            )
        return
    offload = CPUOffloadPolicy(pin_memory=topology.device.type == "cuda") if cpu_offload else OffloadPolicy()
    shard = partial(
        _shard, mesh=topology.fsdp_mesh, reshard_after_forward=reshard_after_forward, offload_policy=offload
    )
    unchanged = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = unchanged
    if mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for module in fp32_modules:
        shard(module, policy=unchanged)
    for module in (*blocks, model):
        shard(module, policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard(
    module: nn.Module,
    *,
    policy: MixedPrecisionPolicy,
    mesh: DeviceMesh,
    reshard_after_forward: bool,
    offload_policy: OffloadPolicy,
) -> None:
    module.register_forward_hook(_without_view)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=policy,
        offload_policy=offload_policy,
    )


def set_requires_gradient_sync(model: nn.Module, required: bool) -> None:
    """Whether the next backward reduces gradients over ranks: False on every micro-step but the last.

    Until then each rank keeps its own whole gradients. A model without FSDP2 has nothing to reduce.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(required)
        model.set_is_last_backward(required)


def _without_view(module: nn.Module, args: object, output: object) -> object:
    """The same memory, not marked as a view: FSDP2 hooks its backward on the output and warns about views."""
    del module, args
    if isinstance(output, torch.Tensor) and output._is_view():
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output
