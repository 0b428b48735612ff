"""Tensor plans applied: weights split, hooks installed, gradients of what stays whole kept right.

Megatron-LM's tensor and sequence parallelism (arXiv 1909.08053, 2205.05198), declared by class attributes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evenspan.errors import PlanError
from evenspan.parallel.arguments import Call
from evenspan.parallel.plan import Mode, parse_plan
from evenspan.parallel.region import Region
from evenspan.parallel.replicated import Completion, Ledger
from evenspan.parallel.resolve import ResolvedPlan, resolve_plan
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
        self.ledger = Ledger(region.group)

    def bind(self, model: nn.Module) -> None:
        """Hold the model's parameters as they are now; call after FSDP2 has replaced them."""
        self.ledger.bind(model, split=self.split)


_APPLIED: WeakKeyDictionary[nn.Module, TensorParallel] = WeakKeyDictionary()


def apply_tensor_plan(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, padding: bool = False
) -> TensorParallel:
    """Make `model` this rank's part of the plan on its class, in place. State-dict keys do not change.

    `mesh` is the one-dim tensor mesh, `padding` accepts sequences that its size does not divide. All ranks
    hold the same whole weights before. Apply before FSDP2, and after activation checkpointing.

    Raises PlanError: P101 to P110, P113 and P117; at the forward P107, P111, P112, P114, P116 and P118.
    """
    if model in _APPLIED:
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
    _APPLIED[model] = applied
    return applied


def applied_plan(model: nn.Module) -> TensorParallel | None:
    """The plan at work on `model`, if any."""
    return _APPLIED.get(model)


def complete_gradients(model: nn.Module) -> int:
    """Sum over the tensor ranks the gradients of which each rank holds a part; how many there were.

    Call once per optimizer step, after the last backward and before clipping. A collective when `model` has a
    tensor plan, nothing otherwise. Raises P115 when called again for the same gradients.
    """
    applied = _APPLIED.get(model)
    return 0 if applied is None else applied.ledger.complete()


def complete_gradients_by_hook(model: nn.Module) -> None:
    """Sum those gradients in every backward instead, for loops that cannot call `complete_gradients`.

    Call once, after FSDP2. Raises P115 when called twice.
    """
    applied = _APPLIED.get(model)
    if applied is not None:
        applied.ledger.install_hooks()


def check_unplanned(resolved: ResolvedPlan) -> None:
    """Raise P113 for parameters below a gathering module that no rule speaks of.

    There each rank works on its own features, and only the plan can say whether a gradient is a part.
    """
    planned = {id(entry.module) for entry in resolved.modules if entry.mode is not Mode.GATHER}
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
                    hint='plan it as "head_norm" if it works on this rank\'s heads or features, '
                    'as "replicated" if every rank repeats it',
                )


def _note_planned(applied: TensorParallel) -> None:
    sequence_parallel = applied.region.sequence_parallel
    for entry in applied.resolved.modules:
        names = [
            f"{entry.path}.{name}".lstrip(".") for name, _ in entry.module.named_parameters(recurse=False)
        ]
        if entry.mode is Mode.HEAD_NORM or (sequence_parallel and entry.mode in (Mode.SEQUENCE, Mode.ROW)):
            completion = Completion.SUM
        else:
            completion = Completion.NONE
        if entry.mode is Mode.ROW:
            names = [name for name in names if name not in applied.split]
        for name in names if entry.mode not in _WATCHED else ():
            applied.ledger.note(name, completion)


_WATCHED = frozenset({Mode.SPLIT, Mode.ENTER, Mode.GATHER_OUTPUT, Mode.GATHER})
"""Modes that say nothing of where their module's own parameters work."""


def _watch_unplanned(applied: TensorParallel, model: nn.Module) -> None:
    planned = {id(entry.module) for entry in applied.resolved.modules if entry.mode not in _WATCHED}
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        if names and id(module) not in planned and module is not model:
            module.register_forward_pre_hook(_Watch(applied, path, names), with_kwargs=True)
        elif module is model:
            for name in names:
                applied.ledger.note(name, Completion.NONE)


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
        self._applied = applied

    def __call__(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._applied.region.begin()
        self._applied.ledger.forget_zeroed()


class _End:
    def __init__(self, applied: TensorParallel) -> None:
        self._applied = applied

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        self._applied.region.end()
