"""What ranks run for the tests of whole optimizer steps on the tensor axis, fp64."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn

from evenspan.comm.collectives import gathered
from evenspan.parallel.clip import clip_grad_norm
from evenspan.parallel.fsdp import shard_model
from evenspan.parallel.tensor import apply_tensor_plan, complete_gradients
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed.cases_tensor import batches, build, full, loss_sum

STEPS = 20


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def one_process(options: dict, replicas: int, max_norm: float) -> tuple[list[float], dict[str, Tensor]]:
    """Norms before clipping at every step, and the weights after all."""
    model = build(options)
    optimizer, norms = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for mine in batches(replicas, count=STEPS, length=8):
            (loss_sum(model, *mine[step], None) / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def same_on_tensor_ranks(parameter: Tensor, group: torch.distributed.ProcessGroup) -> bool:
    """Whether the whole parameter has the same bits on every tensor rank."""
    bits = full(parameter.detach()).contiguous().view(torch.int64).flatten()[None]
    return bool((gathered(bits, 0, group) == bits).all())


def training(ctx, degrees: dict, options: dict, sequence_parallel: bool) -> tuple[float, dict[str, float]]:
    """The largest relative error of the norms; every weight's error, and 1 where tensor ranks differ."""
    topology = build_topology(
        Degrees(**{"replicate": 1, "shard": 1, "context": 1, "tensor": 1, **degrees}), device=ctx.device
    )
    max_norm = statistics.median(one_process(options, topology.degrees.dp, math.inf)[0])
    norms, weights = one_process(options, topology.degrees.dp, max_norm)
    assert min(norms) < max_norm < max(norms), f"clipping must act in some steps only: {norms}"
    model = build(options)
    apply_tensor_plan(model, topology.tensor_mesh, sequence_parallel=sequence_parallel)
    shard_model(model, topology, blocks=model.layers, mixed_precision="fp64")
    group = topology.tensor_mesh.get_group()
    optimizer, worst = optimizer_of(model), 0.0
    for step, batch in enumerate(
        batches(topology.degrees.dp, count=STEPS, length=8)[topology.coordinates.dp]
    ):
        optimizer.zero_grad()
        (loss_sum(model, *batch, group) / topology.degrees.dp).backward()
        complete_gradients(model)
        norm = clip_grad_norm(model.parameters(), max_norm=max_norm)
        optimizer.step()
        worst = max(worst, abs(norm.item() - norms[step]) / norms[step])
    errors = {}
    for name, parameter in model.named_parameters():
        errors[name] = ((full(parameter.detach()) - weights[name]).norm() / weights[name].norm()).item()
        if not same_on_tensor_ranks(parameter, group):
            errors[name] = 1.0
    return worst, errors
