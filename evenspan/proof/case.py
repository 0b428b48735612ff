"""What a proof is about: a model, its batches and its loss, as functions that every rank can call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evenspan.errors import RunError, nearest
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The loss of one batch, or of this rank's share of it, before division."""

    sum: Tensor
    """Scalar with gradients."""
    count: Tensor | float
    """How many tokens (or frames) the sum is over."""
    per_token: Tensor | None = None
    """The losses that were summed, [B, T] with T local; compared token by token where it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What is asked for: the degrees, and how the tensor axis is used."""

    degrees: Degrees
    sequence_parallel: bool = False
    padding: bool = False

    def __str__(self) -> str:
        named = [f"{axis} {degree}" for axis, degree in self.degrees.by_axis().items() if degree > 1]
        text = " x ".join(named) or "one rank"
        return f"{text}, sequence parallel" if self.sequence_parallel else text


Loss = Callable[[nn.Module, Any], "Scored | tuple[Tensor, Tensor | float]"]
Accumulate = Callable[[nn.Module, Sequence[Any], "ProcessGroup | None"], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches and its loss.

    Everything is called on the one process and on every rank, on CPU, in fp64: `model()` is moved to fp64 and
    gets the same weights everywhere; tensors of floats in a batch become fp64. Dropout is switched off.
    """

    model: Callable[[], nn.Module]
    """Builds the whole model."""
    batch: Callable[[int], Any]
    """Micro-batch `number` of the global batch: tensors, or dicts, lists, tuples and dataclasses of them."""
    loss: Loss
    """(sum, count) of this rank's share of a batch, or a Scored. The mean of the global batch is proven."""
    shard: Callable[[Any, Topology], Any] | None = None
    """This context rank's share of a batch; needed for a context degree above 1."""
    place: Callable[[nn.Module, Topology, Layout], None] | None = None
    """Makes the model this rank's part, in place; evenspan's plans and FSDP2 if it is not given."""
    observe: Callable[[Any], Mapping[str, Tensor]] | None = None
    """Facts of a batch per token, [B, T] each, such as positions: joined over `context` they must be those
    of one process."""
    perturb: Callable[[Any, int], Any] | None = None
    """The batch (or a rank's share of it) with global token `number` of its first sample changed."""
    tokens: int | None = None
    """Global tokens of one sample, for `perturb`."""
    accumulate: Accumulate | None = None
    """The training step's own accumulation of gradients, in place of the proof's."""
    micro_batches: int = 2
    """Micro-batches per data-parallel rank."""


CaseFunction = Callable[[], Case]


def load_case(reference: str) -> CaseFunction:
    """The function that `module:function` names. The working directory may hold the module.

    Raises RunError R201.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise RunError(
            "R201", f"{reference!r} names no case", hint="write module:function, such as my_model:case"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RunError(
            "R201",
            f"{module_name} cannot be imported: {error}",
            hint="name a module of the working directory or an installed one, without .py",
        ) from error
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        near = nearest(name, functions) or sorted(functions)[:8]
        raise RunError(
            "R201",
            f"{module_name} has no function {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else "define it at the top of the module",
        )
    return functions[name]


def build_case(function: CaseFunction) -> Case:
    """Call a case function. Raises R201 when it gives no Case."""
    case = function()
    if not isinstance(case, Case):
        raise RunError(
            "R201",
            f"the case function returned {type(case).__name__}",
            hint="return evenspan.proof.case.Case(model=..., batch=..., loss=...)",
        )
    return case


def scored(case: Case, model: nn.Module, batch: Any) -> Scored:
    """The case's loss as a Scored, its count as a tensor."""
    result = case.loss(model, batch)
    if not isinstance(result, Scored):
        total, count = result
        result = Scored(sum=total, count=count)
    return result


def to_fp64(value: Any) -> Any:
    """Every tensor of floats in nested containers as fp64; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_fp64(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_fp64(item) for item in value]
    if type(value) is tuple:
        return tuple(to_fp64(item) for item in value)
    return value


def without_dropout(model: nn.Module) -> None:
    """Switch every dropout module off, in place; the model stays in training mode."""
    for module in dropouts(model):
        module.p = 0.0


def dropouts(model: nn.Module) -> Iterator[nn.modules.dropout._DropoutNd]:
    """The dropout modules of `model`."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module
