"""What ranks run for the parity tests of the tensor axis: one process against a layout, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.parallel.checkpointing import apply_activation_checkpointing
from evenspan.parallel.fsdp import set_requires_gradient_sync, shard_model
from evenspan.parallel.tensor import (
    applied_plan,
    apply_tensor_plan,
    complete_gradients,
    complete_gradients_by_hook,
)
from evenspan.parallel.vocab_loss import vocab_parallel_cross_entropy
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed.toy_decoder import VOCABULARY, ToyDecoder, ToyDecoderFirst


def build(options: dict) -> nn.Module:
    torch.manual_seed(1)
    options = dict(options)
    kind = ToyDecoderFirst if options.pop("sequence_first", False) else ToyDecoder
    return kind(**options).double()


def batches(replicas: int, *, count: int, length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """`count` micro-batches of tokens and labels for each replica; some labels carry no loss."""
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(replicas):
        mine = []
        for _ in range(count):
            tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
            labels = torch.randint(0, VOCABULARY, (2, length), generator=generator)
            labels[0, :3] = -100
            mine.append((tokens, labels))
        out.append(mine)
    return out


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor, group) -> Tensor:
    if model.sequence_first:
        tokens, labels = tokens.T, labels.T
    logits = model(tokens)
    return vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), group=group).sum()


def reference(
    options: dict, replicas: int, *, count: int, length: int
) -> tuple[list[float], dict[str, Tensor]]:
    model = build(options)
    losses = []
    for micro in range(count):
        total = torch.zeros((), dtype=torch.float64)
        for mine in batches(replicas, count=count, length=length):
            loss = loss_sum(model, *mine[micro], None)
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def parity(ctx, degrees: dict, options: dict, run: dict) -> dict[str, float]:
    """The relative errors of the loss and of every gradient; `run` says how, with the defaults below."""
    run = {"count": 1, "length": 8, "sp": True, "fsdp": True, "sync": True, "checkpointing": "none", **run}
    full_degrees = {"replicate": 1, "shard": 1, "context": 1, "tensor": 1, **degrees}
    topology = build_topology(Degrees(**full_degrees), device=ctx.device)
    replicas = topology.degrees.dp
    losses, gradients = reference(options, replicas, count=run["count"], length=run["length"])
    model = build(options)
    apply_activation_checkpointing(model.layers, mode=run["checkpointing"])
    applied = apply_tensor_plan(
        model, topology.tensor_mesh, sequence_parallel=run["sp"], padding=run.get("padding", False)
    )
    if run["fsdp"]:
        shard_model(model, topology, blocks=model.layers, mixed_precision="fp64")
    if run.get("hook"):
        complete_gradients_by_hook(model)
    mine = batches(replicas, count=run["count"], length=run["length"])[topology.coordinates.dp]
    errors = {}
    group = topology.tensor_mesh.get_group()
    if run.get("zeroed"):  # gradients of before, which zero_grad leaves in place
        for _ in range(2):
            loss_sum(model, *mine[0], group).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        if not run.get("hook"):
            complete_gradients(model)
        model.zero_grad(set_to_none=False)
    for micro, batch in enumerate(mine):
        if not run["sync"]:
            set_requires_gradient_sync(model, micro == len(mine) - 1)
        loss = loss_sum(model, *batch, group)
        loss.backward()
        total = loss.detach().clone()
        if topology.dp_group is not None:
            torch.distributed.all_reduce(total, group=topology.dp_group)
        errors[f"loss {micro}"] = abs(total.item() - losses[micro]) / abs(losses[micro])
    if not run.get("hook"):
        complete_gradients(model)
    assert applied_plan(model) is applied
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        expected = gradients[name]
        errors[name] = ((full(parameter.grad) - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return errors


def parities(ctx, cases: list[tuple[dict, dict, dict]]) -> list[dict[str, float]]:
    return [parity(ctx, *case) for case in cases]
