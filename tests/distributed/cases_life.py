"""What ranks run for a planned model's life: copies, wrappers, failures, evaluation, other types."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from evenspan.parallel.tensor import applied_plan, apply_tensor_plan, complete_gradients
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed.cases_kinds import build, mesh_of, outputs, relative
from tests.distributed.cases_tensor import full
from tests.distributed.toy_decoder import WIDTH


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("inner_model."): full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def worst(model: nn.Module, reference: nn.Module) -> float:
    """The largest error of any gradient."""
    found, wanted = gradients(model), gradients(reference)
    assert found.keys() == wanted.keys()
    return max(relative(found[name], wanted[name]) for name in wanted)


def planned(ctx, *, sequence_parallel: bool = True) -> tuple[nn.Module, nn.Module]:
    """A planned model and the same on one process."""
    model, reference = build("FurtherInputs"), build("FurtherInputs")
    apply_tensor_plan(model, mesh_of(ctx), sequence_parallel=sequence_parallel)
    return model, reference


def copied(ctx, sequence_parallel: bool) -> list[float]:
    """Errors of a deep copy, and of the original after it: neither knows of the other."""
    model, reference = planned(ctx, sequence_parallel=sequence_parallel)
    twin = copy.deepcopy(model)
    assert applied_plan(twin) is not applied_plan(model)
    outputs(reference)
    errors = []
    for one in (twin, model):
        outputs(one)
        assert complete_gradients(one) > 0 or not sequence_parallel
        errors.append(worst(one, reference))
    return errors


class Wrapper(nn.Module):
    lengths = (8,)

    def __init__(self, inner_model: nn.Module) -> None:
        super().__init__()
        self.inner_model = inner_model

    def forward(self, x: Tensor) -> Any:
        return self.inner_model(x)


def wrapped(ctx) -> float:
    """The planned model is a part of another one, whose gradients are completed."""
    model, reference = planned(ctx)
    outer = Wrapper(model)
    outputs(reference)
    outputs(outer)
    assert complete_gradients(outer) > 0
    return worst(outer, reference)


def sharded_afterwards(ctx) -> float:
    """FSDP2 by the user's own hand after the plan replaces every parameter; nobody binds them anew."""
    model, reference = planned(ctx)
    topology = build_topology(Degrees(shard=1, tensor=ctx.world_size), device=ctx.device)
    fully_shard(model, mesh=topology.fsdp_mesh)
    outputs(reference)
    outputs(model)
    assert complete_gradients(model) > 0
    return worst(model, reference)


class PlannedError(RuntimeError):
    """What the failing model raises."""


def failing(ctx, sequence_parallel: bool, where: str) -> tuple[float, bool, bool]:
    """Error after a forward that raised within a planned module, whether weights and randomness are back."""
    model, reference = planned(ctx, sequence_parallel=sequence_parallel)
    module = model.get_submodule(where)

    def fail(*_: object) -> None:
        raise PlannedError

    state = torch.get_rng_state()
    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(fail)
        with suppress(PlannedError):
            model(torch.ones(2, 8, WIDTH, dtype=torch.float64))
        handle.remove()
    hidden = [name for name, child in model.named_modules() if {"weight", "bias"} & set(vars(child))]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    if sequence_parallel:  # each of the two forwards took the seed of its rank's stream
        torch.randint(0, 2**62, ())
        torch.randint(0, 2**62, ())
    same_stream = torch.equal(after, torch.get_rng_state()) or not sequence_parallel
    outputs(reference)
    outputs(model)
    complete_gradients(model)
    return worst(model, reference), not hidden, same_stream


def evaluated(ctx, sequence_parallel: bool) -> list[float]:
    """Errors of outputs without gradients, in training and evaluation mode; then of a training step."""
    model, reference = planned(ctx, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors = []
    for context in (torch.no_grad, torch.inference_mode):
        for train in (True, False):
            model.train(train)
            with context():
                errors.append(relative(model(x), reference(x)))
    model.train()
    outputs(reference)
    outputs(model)
    complete_gradients(model)
    return [*errors, worst(model, reference)]


def in_bf16(ctx, sequence_parallel: bool) -> tuple[set[str], float]:
    """Types of outputs and gradients of a bf16 model, and its gradients' largest error against fp64."""
    model, reference = build("FurtherInputs").bfloat16(), build("FurtherInputs")
    apply_tensor_plan(model, mesh_of(ctx), sequence_parallel=sequence_parallel)
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    y = model(x.bfloat16())
    y.float().square().sum().backward()
    complete_gradients(model)
    reference(x.double()).square().sum().backward()
    kinds = {str(y.dtype)} | {str(gradient.dtype) for gradient in gradients(model).values()}
    return kinds, worst(model, reference)
