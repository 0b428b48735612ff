"""Tensor plans applied: weights split, hooks installed, gradients of what stays whole kept right.

Megatron-LM's tensor and sequence parallelism (arXiv 1909.08053, 2205.05198), declared by class attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evenspan.errors import PlanError
from evenspan.parallel.arguments import Call
from evenspan.parallel.plan import Mode, parse_plan
from evenspan.parallel.region import Region
from evenspan.parallel.replicated import Completion, Ledger
from evenspan.parallel.resolve import PlannedModule, ResolvedPlan, resolve_plan
from evenspan.parallel.sharded import split_parameters
from evenspan.parallel.tensor_hooks import (
    Behaviour,
    Enter,
    Gather,
    GatherOutput,
    Replicated,
    Sequence,
    Split,
)
from evenspan.parallel.tensor_modules import (
    Column,
    ColumnGather,
    LossParallel,
    Row,
    Vocabulary,
    WidthNorm,
)

BEHAVIOURS: dict[Mode, type[Behaviour]] = {
    Mode.COL: Column,
    Mode.ROW: Row,
    Mode.SEQUENCE: Sequence,
    Mode.GATHER: Gather,
    Mode.SPLIT: Split,
    Mode.ENTER: Enter,
    Mode.GATHER_OUTPUT: GatherOutput,
    Mode.REPLICATED: Replicated,
    Mode.HEAD_NORM: Behaviour,
    Mode.WIDTH_NORM: WidthNorm,
    Mode.VOCAB: Vocabulary,
    Mode.VOCAB_SEQUENCE: Vocabulary,
    Mode.COL_GATHER: ColumnGather,
    Mode.LOSS_PARALLEL: LossParallel,
}


class TensorParallel:
    """The tensor plan of one model at work."""

    def __init__(self, resolved: ResolvedPlan, region: Region, split: frozenset[str]) -> None:
        self.resolved = resolved
        self.region = region
        self.split = split
        unknown = Completion.SUM if region.sequence_parallel else Completion.NONE
        self.ledger = Ledger(region.group, unknown=unknown)

    def bind(self, model: nn.Module) -> None:
        """Hold the model's parameters as they are now; call after FSDP2 has replaced them."""
        self.ledger.bind(model, split=self.split)


def apply_tensor_plan(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, padding: bool = False
) -> TensorParallel:
    """Make `model` this rank's part of the plan on its class, in place. State-dict keys do not change.

    `mesh` is the one-dim tensor mesh, `padding` accepts sequences that its size does not divide. All ranks
    hold the same whole weights before. Apply before FSDP2, and after activation checkpointing.

    Raises PlanError: P101 to P110, P113 and P117; at the forward P107, P111, P112, P114, P116 and P118.
    """
    if applied_plan(model) is not None:
        raise PlanError(
            "P110",
            f"{type(model).__name__} has its tensor plan applied already",
            hint="apply it once, to a model that holds whole weights",
        )
    plan = parse_plan(type(model), sequence_parallel=sequence_parallel)
    resolved = resolve_plan(plan, model, ranks=mesh.size())
    check_unplanned(resolved)
    region = Region(group=mesh.get_group(), sequence_parallel=sequence_parallel, padding=padding)
    split = split_parameters(resolved.modules, model, mesh)
    applied = TensorParallel(resolved, region, split)
    model.register_forward_pre_hook(_Begin(applied), prepend=True)
    for planned in resolved.modules:
        BEHAVIOURS[planned.mode](planned, region).install()
    model.register_forward_hook(_End(applied), always_call=True)
    _note_planned(applied)
    if sequence_parallel:
        _watch_unplanned(applied, model)
    for _, module, function in resolved.postprocessed:
        function(module, mesh)
    applied.bind(model)
    return applied


def applied_plan(model: nn.Module) -> TensorParallel | None:
    """The plan at work on `model` or on the first module inside of it that has one, if any."""
    return next((applied for _, applied in _applied_plans(model)), None)


def _applied_plans(model: nn.Module) -> Iterator[tuple[nn.Module, TensorParallel]]:
    """Read from the hooks, which stay with a model that is wrapped or copied."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Begin):
                yield module, hook.applied


def complete_gradients(model: nn.Module, *, compare: bool = True) -> int:
    """Sum over the tensor ranks the gradients of which each rank holds a part; how many there were.

    Call once per optimizer step, after the last backward and before clipping. A collective when `model`, or a
    module inside of it, has a tensor plan, nothing otherwise. With `compare` the first call makes sure that
    the other replicated gradients are equal on all ranks. Raises P115 when called again for the same
    gradients, P119 for gradients that should be equal and are not.
    """
    count = 0
    for module, applied in _applied_plans(model):
        applied.bind(module)
        count += applied.ledger.complete(compare=compare)
    return count


def complete_gradients_by_hook(model: nn.Module) -> None:
    """Sum those gradients in every backward instead, for loops that cannot call `complete_gradients`.

    Call once, after FSDP2. Raises P115 when called twice.
    """
    for module, applied in _applied_plans(model):
        applied.bind(module)
        applied.ledger.install_hooks()


def check_unplanned(resolved: ResolvedPlan) -> None:
    """Raise P113 for parameters below a gathering module that no rule speaks of.

    There each rank works on its own features, and only the plan can say whether a gradient is a part.
    """
    planned = {id(entry.module) for entry in resolved.modules if entry.mode is not Mode.GATHER}
    planned |= {id(module) for entry in resolved.modules for _, module in _belonging(entry, resolved.modules)}
    for site in resolved.modules:
        if site.mode is not Mode.GATHER:
            continue
        for path, module in site.module.named_modules(prefix=site.path):
            own = [name for name, _ in module.named_parameters(recurse=False)]
            if own and id(module) not in planned:
                raise PlanError(
                    "P113",
                    f"{path} ({type(module).__name__}) holds {', '.join(own)} below {site.path}, "
                    "whose linears are split, but no entry plans it",
                    hint='plan it as "head_norm" if it works on this rank\'s heads or features, or for them; '
                    'as "replicated" if every rank repeats it and uses it alike',
                )


def _belonging(entry: PlannedModule, planned: tuple[PlannedModule, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The planned module, and what else its entry speaks of: the whole of a compound norm."""
    yield entry.path, entry.module
    if entry.mode not in (Mode.HEAD_NORM, Mode.REPLICATED):
        return
    others = {id(other.module) for other in planned}
    for path, module in entry.module.named_modules(prefix=entry.path):
        if id(module) not in others:
            yield path, module


def _note_planned(applied: TensorParallel) -> None:
    sequence_parallel = applied.region.sequence_parallel
    for entry in applied.resolved.modules:
        if entry.mode in _WATCHED:
            continue
        if entry.mode is Mode.HEAD_NORM or (sequence_parallel and entry.mode in (Mode.SEQUENCE, Mode.ROW)):
            completion = Completion.SUM
        else:
            completion = Completion.NONE
        for name in _names_of(entry, applied.resolved.modules):
            if entry.mode is not Mode.ROW or name not in applied.split:
                applied.ledger.note(name, completion)


def _names_of(entry: PlannedModule, planned: tuple[PlannedModule, ...]) -> Iterator[str]:
    for path, module in _belonging(entry, planned):
        for own in _used_parameters(module):
            yield f"{path}.{own}".lstrip(".")


_WATCHED = frozenset({Mode.SPLIT, Mode.ENTER, Mode.GATHER_OUTPUT, Mode.GATHER})
"""Modes that say nothing of where their module's own parameters work."""


def _watch_unplanned(applied: TensorParallel, model: nn.Module) -> None:
    planned = {
        id(module)
        for entry in applied.resolved.modules
        if entry.mode not in _WATCHED
        for _, module in _belonging(entry, applied.resolved.modules)
    }
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name in _used_parameters(module)]
        if names and id(module) not in planned and module is not model:
            module.register_forward_pre_hook(_Watch(applied, path, names), with_kwargs=True)
        elif module is model:
            for name in names:
                applied.ledger.note(name, Completion.NONE)


def _used_parameters(module: nn.Module) -> Iterator[str]:
    """The parameters that the module's own forward uses: those in lists and dicts of parameters too."""
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return  # never called
    for name, _ in module.named_parameters(recurse=False):
        yield name
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from (f"{name}.{key}" for key, _ in child.named_parameters())


class _Watch:
    """Learns at each call of an unplanned module whether it works on shards."""

    def __init__(self, applied: TensorParallel, path: str, names: list[str]) -> None:
        self._applied = applied
        self._path = path
        self._names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        region = self._applied.region
        if not region.running:
            return  # recomputed in backward: the forward has told
        completion = Completion.NONE
        if region.inside:
            x = Call.of(args, kwargs).hidden_state(self._path)
            dim = self._applied.resolved.plan.sequence_dim
            if x.dim() <= dim or x.shape[dim] not in region.lengths:
                raise PlanError(
                    "P116",
                    f"{self._path} ({type(module).__name__}) holds parameters, stands between shards, and "
                    f"got {list(x.shape)}, which is no shard",
                    hint='plan it as "sequence" if it works on shards, or move it out of the region',
                )
            completion = Completion.SUM
        for name in self._names:
            self._applied.ledger.note(name, completion)


class _Begin:
    def __init__(self, applied: TensorParallel) -> None:
        self.applied = applied

    def __call__(self, module: nn.Module, args: Any) -> None:
        del module, args
        self.applied.region.begin()
        self.applied.ledger.forget_zeroed()


class _End:
    def __init__(self, applied: TensorParallel) -> None:
        self._applied = applied

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._applied.region.end()
