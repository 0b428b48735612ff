"""A parsed plan laid over a live model: every rule finds its modules, or an error says which does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from evenspan.errors import PlanError, nearest
from evenspan.parallel.plan import Mode, Plan, Postprocessor, Rule

WEIGHT_DIMS: dict[Mode, int] = {
    Mode.COL: 0,
    Mode.COL_GATHER: 0,
    Mode.LOSS_PARALLEL: 0,
    Mode.ROW: 1,
    Mode.VOCAB: 0,
    Mode.VOCAB_SEQUENCE: 0,
    Mode.WIDTH_NORM: 0,
}
"""The dim along which a mode splits a weight stored as [out, in]."""

READERS = frozenset({Mode.COL, Mode.COL_GATHER, Mode.LOSS_PARALLEL})
"""Modes that read the whole sequence and give a partial gradient for it."""

_TRANSPOSED = ("Conv1D",)
"""Linear classes that store [in, out] (GPT-2's in transformers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModule:
    """One module of the model and what the plan says of it."""

    path: str
    module: nn.Module
    rule: Rule
    covered: bool = False
    """Whether a module above gathers the input for this one."""

    @property
    def mode(self) -> Mode:
        """The rule's mode."""
        return self.rule.mode

    def split_dims(self) -> dict[str, int]:
        """The dim along which each of its own parameters is split; absent when it stays whole."""
        dim = WEIGHT_DIMS.get(self.mode)
        if dim is None:
            return {}
        weight_dim = 1 - dim if is_transposed(self.module) else dim
        dims = {"weight": weight_dim}
        if self.mode in READERS or self.mode is Mode.WIDTH_NORM:
            dims["bias"] = 0
        return {name: value for name, value in dims.items() if self.module._parameters.get(name) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedPlan:
    """Every planned module, deepest first, and the postprocessor of each module that has one."""

    plan: Plan
    modules: tuple[PlannedModule, ...]
    postprocessed: tuple[tuple[str, nn.Module, Postprocessor], ...]


def resolve_plan(plan: Plan, model: nn.Module, *, ranks: int) -> ResolvedPlan:
    """Find every rule's modules in `model` and check that their modes fit. Changes nothing.

    Raises PlanError: P103 a class, P104 a child, P108 a postprocessor that matches nothing; P105 a mode that
    does not fit its module; P106 a width that `ranks` do not divide; P109 tied weights planned differently;
    P110 one module planned twice; P117 sequence parallelism without an entry.
    """
    found: dict[int, PlannedModule] = {}
    classes = {type(module).__name__ for module in model.modules()}
    for rule in plan.rules:
        owners = [(path, module) for path, module in model.named_modules() if _is(module, rule.owner)]
        if not owners:
            raise _no_class("P103", plan, rule.owner, classes, what=rule.at)
        for path, owner in owners:
            planned = _planned(rule, path, owner)
            earlier = found.get(id(planned.module))
            if earlier is not None and earlier.rule.mode is not rule.mode:
                raise PlanError(
                    "P110",
                    f"{planned.path} is planned twice: {earlier.rule.at} says {earlier.mode}, "
                    f"{rule.at} says {rule.mode}",
                    hint="keep one of the entries",
                )
            found[id(planned.module)] = planned
    for planned in found.values():
        _check_fit(planned, ranks=ranks)
    if plan.sequence_parallel:
        _check_entry(plan, found)
    modules = _with_gathers(plan, model, found)
    _check_ties(model, modules)
    return ResolvedPlan(plan=plan, modules=modules, postprocessed=_postprocessed(plan, model, classes))


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear module stores its weight as [in, out]."""
    return type(module).__name__ in _TRANSPOSED


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain matrix product with an optional bias."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def _is(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == name


def _no_class(code: str, plan: Plan, name: str, classes: set[str], *, what: str) -> PlanError:
    near = nearest(name, classes) or sorted(classes)[:8]
    return PlanError(
        code,
        f"{what}: no module of {plan.model_class} is a {name}",
        hint=f"did you mean {' or '.join(near)}?",
    )


def _planned(rule: Rule, path: str, owner: nn.Module) -> PlannedModule:
    module: nn.Module = owner
    walked: list[str] = []
    for name in rule.child.split(".") if rule.child else []:
        children = dict(module.named_children())
        if name not in children:
            near = nearest(name, children) or sorted(children)[:8]
            where = ".".join([rule.owner, *walked])
            raise PlanError(
                "P104",
                f"{rule.at}: {where} has no child {name!r}",
                hint=f"did you mean {' or '.join(near)}?" if near else f"{where} has no children at all",
            )
        module = children[name]
        walked.append(name)
    return PlannedModule(path=".".join([*filter(None, [path]), *walked]), module=module, rule=rule)


def _check_fit(planned: PlannedModule, *, ranks: int) -> None:
    module, mode = planned.module, planned.mode
    kind = type(module).__name__
    wanted = ""
    if mode in READERS or mode is Mode.ROW:
        wanted = "" if is_linear(module) else "a Linear"
    elif mode in (Mode.VOCAB, Mode.VOCAB_SEQUENCE):
        wanted = "" if isinstance(module, nn.Embedding) else "an Embedding"
        if not wanted and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
            wanted = "an Embedding without max_norm, sparse and scale_grad_by_freq"
    elif mode is Mode.WIDTH_NORM:
        fits = "RMSNorm" in kind and module._parameters.get("bias") is None
        wanted = "" if fits else "an RMS norm with a weight and no bias"
    elif mode is Mode.HEAD_NORM:
        wanted = "" if any(True for _ in module.parameters()) else "a module with parameters"
    if wanted:
        raise PlanError(
            "P105",
            f"{planned.rule.at} = {mode.value}: {planned.path} is a {kind}",
            hint=f"{mode.value} needs {wanted}",
        )
    if planned.rule.save_shard and mode not in (Mode.GATHER, *READERS):
        raise PlanError(
            "P105",
            f"{planned.rule.at} = {mode.value} has save: shard, but gathers nothing",
            hint="write save: shard on an entry of mode gather or col",
        )
    for name, dim in planned.split_dims().items():
        width = getattr(module, name).shape[dim]
        if width % ranks:
            raise PlanError(
                "P106",
                f"{planned.path}.{name} of shape {list(getattr(module, name).shape)} is split {mode.value} "
                f"over {ranks} tensor ranks, which do not divide {width}",
                hint=f"use a tensor degree that divides {width}, or leave {planned.rule.at} out of the plan",
            )


def _check_entry(plan: Plan, found: Mapping[int, PlannedModule]) -> None:
    modes = {planned.mode for planned in found.values()}
    if modes & {Mode.SEQUENCE, Mode.ROW, Mode.GATHER} and not modes & {
        Mode.SPLIT,
        Mode.ENTER,
        Mode.VOCAB_SEQUENCE,
    }:
        raise PlanError(
            "P117",
            f"the plan of {plan.model_class} has sequence-parallel modules, but nothing cuts the sequence",
            hint='plan the entry: the embedding as "split" or "vocab_sequence", or a block as "enter"',
        )


def _with_gathers(
    plan: Plan, model: nn.Module, found: Mapping[int, PlannedModule]
) -> tuple[PlannedModule, ...]:
    """The planned modules deepest first, with a gather on the parent of column linears that name none.

    The parent, not each linear, so that a module which reshapes by the length of its input sees the whole
    sequence. A parent that also holds work on shards is left alone: its linears gather, once, themselves.
    """
    by_path = dict(model.named_modules())
    planned = dict(found)
    on_shards = [
        ".".join(filter(None, (path, child)))
        for path, module in by_path.items()
        for owner, child in plan.on_shards
        if _is(module, owner)
    ]
    for entry in found.values():
        if entry.mode is not Mode.COL or _gatherer(entry.path, by_path, planned) is not None:
            continue
        parent_path = entry.path.rpartition(".")[0]
        parent = by_path[parent_path]
        if parent is model or any(path.startswith(f"{parent_path}.") for path in on_shards):
            continue
        if id(parent) not in planned:
            rule = Rule(
                owner=type(parent).__name__,
                child="",
                mode=Mode.GATHER,
                sequence_dim=entry.rule.sequence_dim,
                save_shard=entry.rule.save_shard,
            )
            planned[id(parent)] = PlannedModule(path=parent_path, module=parent, rule=rule)
    resolved = [
        PlannedModule(
            path=entry.path,
            module=entry.module,
            rule=entry.rule,
            covered=_gatherer(entry.path, by_path, planned) is not None,
        )
        for entry in planned.values()
    ]
    return tuple(sorted(resolved, key=lambda entry: (-entry.path.count("."), entry.path == "")))


def _gatherer(
    path: str, by_path: Mapping[str, nn.Module], planned: Mapping[int, PlannedModule]
) -> PlannedModule | None:
    """The nearest module above `path` that gathers its input."""
    while path:
        path = path.rpartition(".")[0]
        entry = planned.get(id(by_path[path]))
        if entry is not None and entry.mode is Mode.GATHER:
            return entry
    return None


def _check_ties(model: nn.Module, modules: tuple[PlannedModule, ...]) -> None:
    """Modules that share a parameter must split it alike, or none may."""
    dims = {(id(entry.module), name): dim for entry in modules for name, dim in entry.split_dims().items()}
    users: dict[int, list[tuple[str, int | None]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append((f"{path}.{name}", dims.get((id(module), name))))
    for uses in users.values():
        if len({dim for _, dim in uses}) > 1:
            said = ", ".join(
                f"{path} {'whole' if dim is None else f'split by dim {dim}'}" for path, dim in uses
            )
            raise PlanError(
                "P109",
                f"one tied weight is planned in two ways: {said}",
                hint="plan both alike: an embedding as vocab or vocab_sequence goes with a head as "
                "col_gather or loss_parallel; or leave both out",
            )


def _postprocessed(
    plan: Plan, model: nn.Module, classes: set[str]
) -> tuple[tuple[str, nn.Module, Postprocessor], ...]:
    counts = Counter(type(module).__name__ for module in model.modules())
    for name in plan.postprocessors:
        if not counts[name]:
            raise _no_class("P108", plan, name, classes, what=f"postprocessor {name!r}")
    chosen = [
        (path, module, plan.postprocessors[type(module).__name__])
        for path, module in model.named_modules()
        if type(module).__name__ in plan.postprocessors
    ]
    return tuple(sorted(chosen, key=lambda item: (-item[0].count("."), item[0] == "")))
