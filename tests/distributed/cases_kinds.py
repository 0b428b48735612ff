"""What ranks run for the kinds of models in kinds_tensor: parity with one process, fp64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenspan.errors import PlanError
from evenspan.parallel.tensor import apply_tensor_plan, complete_gradients
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed.cases_tensor import full
from tests.distributed.kinds_tensor import KINDS, WRONG
from tests.distributed.toy_decoder import WIDTH


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return KINDS[kind]().double()


def mesh_of(ctx):
    return build_topology(Degrees(tensor=ctx.world_size), device=ctx.device).tensor_mesh


def outputs(model: nn.Module, *, rounds: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and outputs of forwards of all the kind's lengths, then backwards of all, `rounds` times."""
    inputs, results = [], []
    for number in range(rounds):
        losses = []
        for position, length in enumerate(type(model).lengths):
            generator = torch.Generator().manual_seed(10 * number + position)
            x = torch.randn(2, length, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
            y = model(x)
            weight = torch.randn(y.shape, dtype=y.dtype, generator=generator)
            inputs.append(x)
            results.append(y.detach())
            losses.append((weight * y.square()).sum())
        for loss in losses:
            loss.backward()
    return inputs, results


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def kind_errors(ctx, kind: str, sequence_parallel: bool) -> dict[str, float]:
    """Errors of outputs, of the inputs' gradients and of every parameter's; 1.0 where one has none."""
    model, reference = build(kind), build(kind)
    keys, trained = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    apply_tensor_plan(model, mesh_of(ctx), sequence_parallel=sequence_parallel, padding=True)
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == trained
    (inputs, found), (wanted_inputs, wanted) = (outputs(m, rounds=2) for m in (model, reference))
    complete_gradients(model)
    errors = {f"output {n}": relative(a, b) for n, (a, b) in enumerate(zip(found, wanted, strict=True))}
    for number, (x, y) in enumerate(zip(inputs, wanted_inputs, strict=True)):
        errors[f"input {number}"] = relative(x.grad, y.grad)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted_grad = expected[name].grad
        if parameter.grad is None or wanted_grad is None:
            errors[name] = float((parameter.grad is None) != (wanted_grad is None))
        else:
            errors[name] = relative(full(parameter.grad), wanted_grad)
    return errors


def all_kinds(ctx, kinds: list[str]) -> dict[str, dict[str, float]]:
    return {f"{kind}, SP {sp}": kind_errors(ctx, kind, sp) for kind in kinds for sp in (True, False)}


def error_of(ctx, kind: str) -> str:
    """The plan error of a forward, a backward and the completion of a wrong model."""
    torch.manual_seed(5)
    model = WRONG[kind]().double()
    apply_tensor_plan(model, mesh_of(ctx), sequence_parallel=True)
    try:
        outputs(model)
        complete_gradients(model)
    except PlanError as error:
        return str(error)
    return "no error"
