"""Tensor plans as written on a model's class, read into typed rules. No model is touched here.

The four attributes keep the names and the modes `col`, `row` and `sequence` that mvp-engine's users know;
the further modes say what real models need at the boundaries (see docs/concepts/tensor_plans.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evenspan.errors import PlanError, nearest

_Word = TypeVar("_Word", bound=StrEnum)

Postprocessor = Callable[[nn.Module, DeviceMesh], None]

TP_PLAN = "TP_MODULE_CONFIG"
POSTPROCESSORS = "TP_MODULE_POSTPROCESSORS"
SP_PLAN = "SEQUENCE_PARALLEL_MODULE_CONFIG"
SEQUENCE_DIM = "SEQUENCE_PARALLEL_SEQUENCE_DIM"


class Mode(StrEnum):
    """What a plan may say of one module. `shard` below is this rank's part along the sequence."""

    COL = "col"
    """Linear split by output features; reads the whole sequence, writes this rank's features."""
    ROW = "row"
    """Linear split by input features; its partial outputs are summed, into shards inside the region."""
    SEQUENCE = "sequence"
    """Works on shards; its parameters' gradients are summed over the ranks."""
    GATHER = "gather"
    """Input gathered once for every child that reads it, its gradient reduce-scattered once."""
    SPLIT = "split"
    """Output cut into shards: the entry of the sequence-parallel region."""
    ENTER = "enter"
    """Input cut into shards before the module runs."""
    GATHER_OUTPUT = "gather_output"
    """Output joined from shards, for work that every rank repeats: the exit of the region."""
    REPLICATED = "replicated"
    """Every rank repeats this module on the same whole input, and what follows from its output."""
    HEAD_NORM = "head_norm"
    """Whole parameters that work on, or for, this rank's heads or features; gradients are summed over the
    ranks."""
    WIDTH_NORM = "width_norm"
    """RMS norm over a width that is split over the ranks; the mean square is over the whole width."""
    VOCAB = "vocab"
    """Embedding split over the vocabulary, whole output."""
    VOCAB_SEQUENCE = "vocab_sequence"
    """Embedding split over the vocabulary, output in shards: another entry of the region."""
    COL_GATHER = "col_gather"
    """Linear split by output features whose output features are gathered (logits)."""
    LOSS_PARALLEL = "loss_parallel"
    """Linear split over the vocabulary whose logits stay split, for vocab_parallel_cross_entropy."""


SP_ONLY = frozenset({Mode.SEQUENCE, Mode.SPLIT, Mode.ENTER, Mode.GATHER_OUTPUT, Mode.VOCAB_SEQUENCE})
"""Modes that mean nothing without a sequence-parallel region."""


class ArgumentLayout(StrEnum):
    """What a plan may say of a further tensor argument of a module."""

    SPLIT = "split"
    """All ranks hold it whole; the module gets this rank's shard, its gradient is gathered."""
    GATHER = "gather"
    """A shard; the module gets it whole, its gradient is reduce-scattered."""
    COPY = "copy"
    """Whole on all ranks and used by each for its own features; its gradient is summed."""
    KEEP = "keep"
    """Right as it comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentRule:
    """The layout of one argument and the dim along which it is cut or joined."""

    layout: ArgumentLayout
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One entry of a plan: the module at `child` of every `owner`, by class name."""

    owner: str
    child: str
    """Dotted path below the owner; empty for the owner itself."""
    mode: Mode
    sequence_dim: int
    save_shard: bool = False
    """Whether backward keeps only the shard of what is gathered here, and gathers it again."""
    arguments: Mapping[str, ArgumentRule] = field(default_factory=dict)

    @property
    def at(self) -> str:
        """How messages name the entry."""
        return f"{self.owner}.{self.child}" if self.child else self.owner


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All rules of one model class, with its postprocessors by class name."""

    model_class: str
    rules: tuple[Rule, ...]
    postprocessors: Mapping[str, Postprocessor]
    sequence_parallel: bool
    sequence_dim: int
    on_shards: tuple[tuple[str, str], ...] = ()
    """Owner and child of what works on shards with sequence parallelism, also when it is off."""


def parse_plan(model_class: type[nn.Module], *, sequence_parallel: bool) -> Plan:
    """The plan bound to `model_class`; with `sequence_parallel` its SP entries are merged in and win.

    Raises PlanError P101 for a missing or misformed attribute, P102 for an unknown mode, layout or key, P107
    for a sequence dim that is none.
    """
    name = model_class.__name__
    tensor_plan = _mapping(model_class, TP_PLAN, required=True)
    sequence_plan = _mapping(model_class, SP_PLAN) if sequence_parallel else {}
    dim = inspect.getattr_static(model_class, SEQUENCE_DIM, 1)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise PlanError(
            "P107",
            f"{name}.{SEQUENCE_DIM} = {dim!r} is no dimension",
            hint="write 1 for [batch, sequence, hidden], 0 for [sequence, batch, hidden]",
        )
    merged: dict[tuple[str, str], Rule] = {}
    on_shards: list[tuple[str, str]] = []
    for attribute, plan in ((TP_PLAN, tensor_plan), (SP_PLAN, sequence_plan)):
        for rule in _rules(plan, attribute=f"{name}.{attribute}", dim=dim):
            if rule.mode in SP_ONLY:
                on_shards.append((rule.owner, rule.child))
            if sequence_parallel or rule.mode not in SP_ONLY:
                merged[rule.owner, rule.child] = rule
    if not sequence_parallel:
        on_shards += _shard_entries(_mapping(model_class, SP_PLAN))
    return Plan(
        model_class=name,
        rules=tuple(merged.values()),
        postprocessors=_postprocessors(model_class),
        sequence_parallel=sequence_parallel,
        sequence_dim=dim,
        on_shards=tuple(on_shards),
    )


def _shard_entries(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a sequence-parallel plan that is not used now says of shards; it is checked when it is used."""
    for owner, children in plan.items():
        for child, value in children.items() if isinstance(children, Mapping) else ():
            mode = value.get("mode") if isinstance(value, Mapping) else value
            if isinstance(mode, str) and mode.lower() in SP_ONLY:
                yield str(owner), "" if child == "self" else str(child)


def _rules(plan: Mapping[str, Any], *, attribute: str, dim: int) -> Iterator[Rule]:
    for owner, children in plan.items():
        if not isinstance(children, Mapping):
            raise PlanError(
                "P101",
                f"{attribute}[{owner!r}] is {children!r}",
                hint='write a dict of children and modes, such as {"q_proj": "col"}',
            )
        for child, value in children.items():
            yield _rule(str(owner), str(child), value, attribute=attribute, dim=dim)


def _mapping(model_class: type[nn.Module], attribute: str, *, required: bool = False) -> Mapping[str, Any]:
    value = inspect.getattr_static(model_class, attribute, None if required else {})
    if not isinstance(value, Mapping) or (required and not value):
        found = "is missing" if value is None else f"is {value!r}"
        raise PlanError(
            "P101",
            f"{model_class.__name__}.{attribute} {found}",
            hint='bind a dict on the model\'s class: {"<runtime class>": {"<child>": "col"}}',
        )
    return value


def _postprocessors(model_class: type[nn.Module]) -> Mapping[str, Postprocessor]:
    found = _mapping(model_class, POSTPROCESSORS)
    for owner, function in found.items():
        if not callable(function):
            raise PlanError(
                "P108",
                f"{model_class.__name__}.{POSTPROCESSORS}[{owner!r}] = {function!r} cannot be called",
                hint="write a function of (module, tensor mesh)",
            )
    return found


_KEYS = ("mode", "sequence_dim", "save", "arguments")


def _rule(owner: str, child: str, value: Any, *, attribute: str, dim: int) -> Rule:
    at = f"{attribute}[{owner!r}][{child!r}]"
    written = value if isinstance(value, Mapping) else {"mode": value}
    if unknown := [key for key in written if key not in _KEYS]:
        raise _unknown(f"{at} has a key {unknown[0]!r}", str(unknown[0]), _KEYS)
    own_dim = written.get("sequence_dim", dim)
    if isinstance(own_dim, bool) or not isinstance(own_dim, int):
        raise PlanError("P107", f"{at}: sequence_dim {own_dim!r} is no dimension", hint=f"write {dim}")
    save = written.get("save", "full")
    if save not in ("full", "shard"):
        raise _unknown(f"{at} has save {save!r}", str(save), ("full", "shard"))
    arguments = written.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise PlanError(
            "P101", f"{at}: arguments are {arguments!r}", hint='write a dict such as {"scale": "split"}'
        )
    return Rule(
        owner=owner,
        child="" if child == "self" else child,
        mode=_member(Mode, written.get("mode"), at),
        sequence_dim=own_dim,
        save_shard=save == "shard",
        arguments={name: _argument(entry, f"{at}.{name}", own_dim) for name, entry in arguments.items()},
    )


def _argument(entry: Any, at: str, dim: int) -> ArgumentRule:
    written = entry if isinstance(entry, Mapping) else {"layout": entry}
    if unknown := [key for key in written if key not in ("layout", "dim")]:
        raise _unknown(f"{at} has a key {unknown[0]!r}", str(unknown[0]), ("layout", "dim"))
    own_dim = written.get("dim", dim)
    if isinstance(own_dim, bool) or not isinstance(own_dim, int):
        raise PlanError("P107", f"{at}: dim {own_dim!r} is no dimension", hint=f"write {dim}")
    return ArgumentRule(layout=_member(ArgumentLayout, written.get("layout"), at), dim=own_dim)


def _member(kind: type[_Word], value: Any, at: str) -> _Word:
    word = value.lower() if isinstance(value, str) else value
    if word in [member.value for member in kind]:
        return kind(word)
    raise _unknown(f"{at} = {value!r}", str(value), [member.value for member in kind])


def _unknown(fact: str, word: str, known: Any) -> PlanError:
    near = nearest(word.lower(), known) or list(known)
    return PlanError("P102", f"{fact}, which is unknown", hint=f"use one of {', '.join(near)}")
