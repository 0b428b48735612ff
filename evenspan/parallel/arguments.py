"""Which argument of a call is the hidden state, and what becomes of the other tensors."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenspan.comm.collectives import Loss, gather_tokens, split_tokens
from evenspan.errors import PlanError, nearest
from evenspan.parallel.plan import ArgumentLayout, Mode, Rule
from evenspan.parallel.region import Region

HIDDEN_NAMES = ("hidden_states", "hidden_state", "x", "input", "inputs", "inputs_embeds")
"""Keyword names of a hidden state, for calls without a positional tensor."""


@dataclass(slots=True)
class Call:
    """The arguments of one call of a module, changed in place."""

    args: list[Any]
    kwargs: dict[str, Any]
    hidden: int | str | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call, with its hidden state found: the first positional tensor of floats or else a keyword.

        Without floats it is the first tensor: token ids of an embedding.
        """
        return cls(list(args), dict(kwargs), _find_hidden(args, kwargs))

    def __getitem__(self, key: int | str) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def __setitem__(self, key: int | str, value: Any) -> None:
        if isinstance(key, int):
            self.args[key] = value
        else:
            self.kwargs[key] = value

    def hidden_state(self, at: str) -> Tensor:
        """The hidden state. Raises P118 when the call has none."""
        if self.hidden is None:
            names = ", ".join(self.kwargs) or "none"
            raise PlanError(
                "P118",
                f"{at} was called without a hidden state ({len(self.args)} positional arguments, "
                f"keywords {names})",
                hint=f"pass it first, or as {HIDDEN_NAMES[0]}",
            )
        return self[self.hidden]

    def others(self) -> Iterator[tuple[int | str, Tensor]]:
        """Every other tensor of the call and where it stands."""
        for position, value in enumerate(self.args):
            if isinstance(value, torch.Tensor) and position != self.hidden:
                yield position, value
        for name, value in self.kwargs.items():
            if isinstance(value, torch.Tensor) and name != self.hidden:
                yield name, value


def argument_names(module: nn.Module, rule: Rule, at: str) -> list[str]:
    """The names of `module.forward`'s arguments. Raises P114 when the rule names one that is not there."""
    parameters = inspect.signature(module.forward).parameters
    names = list(parameters)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in rule.arguments:
        if name not in names and not open_ended:
            raise PlanError(
                "P114",
                f"{at}: {type(module).__name__}.forward has no argument {name!r}",
                hint=f"did you mean {' or '.join(nearest(name, names) or names)}?",
            )
    return names


def lay_out_arguments(call: Call, rule: Rule, region: Region, names: list[str], at: str) -> None:
    """Bring every further tensor of the call into the layout that the rule declares. Raises P114."""
    declared: set[int | str] = set()
    for name, argument in rule.arguments.items():
        key: int | str = name
        if name not in call.kwargs:
            if name not in names or names.index(name) >= len(call.args):
                continue
            key = names.index(name)
        declared.add(key)
        if isinstance(call[key], torch.Tensor):
            call[key] = _laid_out(call[key], argument.layout, argument.dim, region, f"{at}.{name}")
    for key, tensor in call.others():
        if key not in declared:
            word = key if isinstance(key, str) else (names[key] if key < len(names) else str(key))
            _check_undeclared(tensor, rule, region, at, word)


def _laid_out(x: Tensor, layout: ArgumentLayout, dim: int, region: Region, at: str) -> Tensor:
    if layout is ArgumentLayout.COPY:
        return region.copy(x)
    if layout is ArgumentLayout.KEEP or not region.sequence_parallel:
        return x
    if layout is ArgumentLayout.SPLIT:
        return _split(x, dim, region, at)
    return gather_tokens(x, dim=dim, group=region.group, loss=Loss.SHARED)


def _split(x: Tensor, dim: int, region: Region, at: str) -> Tensor:
    if not 0 <= dim < x.dim() or x.shape[dim] % region.ranks:
        raise PlanError(
            "P114",
            f"{at} of shape {list(x.shape)} cannot be cut along dim {dim} for {region.ranks} tensor ranks",
            hint="declare the dim that runs along the sequence, and a length that the ranks divide",
        )
    return split_tokens(x, dim=dim, group=region.group, loss=Loss.REPEATED)


def _check_undeclared(x: Tensor, rule: Rule, region: Region, at: str, name: str) -> None:
    dim = rule.sequence_dim
    size = x.shape[dim] if x.dim() > dim else None
    fact = ""
    if rule.mode is Mode.GATHER and x.requires_grad:
        fact = "would get this rank's part of its gradient only"
    elif region.sequence_parallel and size is not None and size > 1:
        if rule.mode is Mode.GATHER and size in region.lengths and size not in region.lengths.values():
            fact = f"has the {size} tokens of a shard, and the module works on the whole sequence"
        if rule.mode is Mode.SEQUENCE and size in region.lengths.values() and size not in region.lengths:
            fact = f"has all {size} tokens, and the module works on shards"
    if fact:
        layouts = ", ".join(layout.value for layout in ArgumentLayout)
        raise PlanError(
            "P114",
            f"{at}: tensor argument {name} of shape {list(x.shape)} {fact}",
            hint=f'declare it in the plan: {{"mode": "{rule.mode.value}", "arguments": {{"{name}": '
            f'{{"layout": ..., "dim": {dim}}}}}}} with one of {layouts}',
        )


def on_first(output: Any, function: Callable[[Tensor], Tensor], at: str) -> Any:
    """The output with `function` of its hidden state in place: itself, or its first tensor of floats.

    Tuples, lists, mappings and dataclasses keep their kind and everything else. Raises P118 without one.
    """
    if isinstance(output, torch.Tensor):
        return function(output)
    parts: list[tuple[Any, Any]] = []
    if isinstance(output, tuple | list):
        parts = list(enumerate(output))
    elif isinstance(output, Mapping):
        parts = list(output.items())
    elif dataclasses.is_dataclass(output):
        parts = [(entry.name, getattr(output, entry.name)) for entry in dataclasses.fields(output)]
    key = next((key for key, value in parts if _is_floats(value)), None)
    if key is None:
        raise PlanError(
            "P118",
            f"{at} returned a {type(output).__name__} without a hidden state",
            hint="return it as a tensor, or as the first tensor of a tuple, dict or dataclass",
        )
    return _with_part(output, key, function(dict(parts)[key]))


def _with_part(output: Any, key: Any, value: Tensor) -> Any:
    if isinstance(output, tuple):
        items = (*output[:key], value, *output[key + 1 :])
        named = inspect.getattr_static(type(output), "_fields", None) is not None
        return type(output)(*items) if named else items
    if isinstance(output, list | Mapping):
        changed: Any = copy.copy(output)
        changed[key] = value
        return changed
    return dataclasses.replace(output, **{key: value})


def _is_floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    positions = [position for position, value in enumerate(args) if isinstance(value, torch.Tensor)]
    if positions:
        floats = [position for position in positions if _is_floats(args[position])]
        named = [name for name in HIDDEN_NAMES if _is_floats(kwargs.get(name))]
        return (floats or named or positions)[0]
    for name in HIDDEN_NAMES:
        if isinstance(kwargs.get(name), torch.Tensor):
            return name
    only = [name for name, value in kwargs.items() if _is_floats(value)]
    return only[0] if len(only) == 1 else None
