"""Gradients of parameters that every tensor rank holds whole: which need a sum over the ranks, and the sum.

A parameter whose module worked on this rank's tokens or features has this rank's part of its gradient; one
whose module did the same work on every rank has all of it. The first kind is summed exactly once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.comm.collectives import summed
from evenspan.errors import PlanError

DIFFERENT = 1e-2
"""Relative difference of norms between ranks beyond which a gradient was not computed by the same work."""
NOISE = 1e-9
"""Norms below this share of the largest are rounding."""


class Completion(StrEnum):
    """What the gradient of a replicated parameter lacks."""

    NONE = "none"
    """Nothing: every rank has it whole."""
    SUM = "sum"
    """The other ranks' parts."""


class Ledger:
    """What is known of each replicated parameter of one model, and which gradients were completed.

    A tied parameter is one parameter; it goes by the first of its names.
    """

    def __init__(self, group: dist.ProcessGroup, *, unknown: Completion) -> None:
        self.group = group
        self._unknown = unknown
        """What a parameter needs that no call told of: on another rank a call may have."""
        self.completions: dict[str, Completion] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._first_names: dict[str, str] = {}
        self._split: frozenset[str] = frozenset()
        self._done: dict[str, weakref.ref[Tensor]] = {}
        self._by_hook: dict[str, _Completed] = {}
        self._hooked = False
        self._compared = False

    def __deepcopy__(self, memo: dict[int, object]) -> Ledger:
        """A ledger for a copied model, over the same ranks: nothing of it was completed."""
        del memo
        twin = Ledger(self.group, unknown=self._unknown)
        twin.completions = dict(self.completions)
        twin._first_names = dict(self._first_names)
        return twin

    def note(self, name: str, completion: Completion) -> None:
        """Record what parameter `name` needs. Raises P116 when another use of it needed something else."""
        first = self._first_names.get(name, name)
        known = self.completions.setdefault(first, completion)
        if known is not completion:
            also = "" if first == name else f" (tied to {first})"
            raise PlanError(
                "P116",
                f"{name}{also} worked on shards in one call and on whole tensors in another",
                hint="give each use a module of its own, or move one of them across the region's boundary",
            )

    def bind(self, model: nn.Module, *, split: frozenset[str]) -> None:
        """Hold the parameters by name, as they are now; those in `split` are complete anyway."""
        first: dict[int, str] = {}
        self._split = split
        self._parameters = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first_names[name] = first.setdefault(id(parameter), name)
            if name not in split and self._first_names[name] == name:
                self._parameters[name] = parameter

    def incomplete(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained and whose gradients are parts."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if self.completions.get(name, self._unknown) is Completion.SUM and parameter.requires_grad
        }

    def forget_zeroed(self) -> None:
        """Gradients that were set to zero in place may be completed again."""
        for name in list(self._done):
            gradient = self._done[name]()
            if gradient is None or not local(gradient).any():
                del self._done[name]
        for completed in self._by_hook.values():
            completed.follow()

    def complete(self, *, compare: bool) -> int:
        """Sum the partial gradients over the tensor ranks, in one all-reduce per dtype; how many there were.

        A gradient that only other ranks have is zero here. With `compare` the first call also compares the
        gradients that are taken for whole. Raises P115 when a gradient was completed already, P116 for one of
        which no call told, P119 when one that is taken for whole differs between the ranks.
        """
        parameters = self.incomplete()
        for name, parameter in parameters.items():
            done = self._done.get(name)
            if parameter.grad is not None and (
                self._hooked or (done is not None and done() is parameter.grad)
            ):
                raise PlanError(
                    "P115",
                    f"the gradient of {name} was summed over the {self.group.size()} tensor ranks already",
                    hint="call complete_gradients once between zero_grad and the optimizer step"
                    if not self._hooked
                    else "hooks sum it in every backward: leave complete_gradients out",
                )
        self._expect_known(parameters)
        if compare and not self._compared:
            self.compare()
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters.values():
            dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
            by_dtype.setdefault(dtype, []).append(parameter)
        for dtype, some in by_dtype.items():
            sum_gradients(some, dtype, self.group)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._done[name] = weakref.ref(parameter.grad)
        return sum(parameter.grad is not None for parameter in parameters.values())

    def _expect_known(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None and name not in self.completions:
                raise PlanError(
                    "P116",
                    f"{name} has a gradient, but its module was never called, and no entry plans it",
                    hint="call the module instead of reading its parameter; or plan it, as "
                    '"sequence" if it works on shards, as "replicated" if on whole tensors',
                )

    def compare(self) -> None:
        """Raise P119 when a gradient that is taken for whole differs between the tensor ranks."""
        self._compared = True
        parts = self.incomplete()
        whole = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name not in parts and parameter.requires_grad
        }
        different = different_gradients(whole, self.group)
        if different:
            raise PlanError(
                "P119",
                f"the gradient of {' and of '.join(different[:3])} differs between the {self.group.size()} "
                f"tensor ranks, but is taken for whole ({len(different)} in all)",
                hint='plan its module: as "sequence" if it works on shards, as "head_norm" if this '
                "rank uses its output for its own heads or features",
            )

    def install_hooks(self) -> None:
        """Sum what each backward adds as soon as it is there, for loops without a place for `complete`.

        One all-reduce per parameter and backward, and a copy of each gradient. Raises P115 when called twice.
        """
        if self._hooked:
            raise PlanError(
                "P115", "gradient hooks are installed already", hint="call complete_gradients_by_hook once"
            )
        self._hooked = True
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Hook(self, name))

    def complete_added(self, name: str, parameter: Tensor) -> None:
        """Sum what was added to one gradient since it was last complete."""
        gradient = parameter.grad
        if gradient is None or self.completions.get(name, self._unknown) is not Completion.SUM:
            return
        self._expect_known({name: self._parameters[name]})
        part = local(gradient)
        known = self._by_hook.get(name)
        if known is not None and known.gradient() is gradient:
            part.copy_(known.values + summed(part - known.values, self.group))
        else:
            part.copy_(summed(part, self.group))
        self._by_hook[name] = _Completed(weakref.ref(gradient), part.clone(), _versions(gradient))


@dataclass(slots=True)
class _Completed:
    """A gradient as a hook left it: complete."""

    gradient: weakref.ref[Tensor]
    values: Tensor
    versions: tuple[int, int]

    def follow(self) -> None:
        """Between backwards the loop may have zeroed or scaled the gradient in place: still complete."""
        gradient = self.gradient()
        if gradient is not None and _versions(gradient) != self.versions:
            self.values = local(gradient).clone()
            self.versions = _versions(gradient)


def _versions(gradient: Tensor) -> tuple[int, int]:
    """How often it was written to: a distributed tensor and its local part count apart."""
    return gradient._version, local(gradient)._version


class _Hook:
    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __call__(self, parameter: Tensor) -> None:
        self._ledger.complete_added(self._name, parameter)


def sum_gradients(parameters: list[nn.Parameter], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Sum gradients over the ranks in one all-reduce; where only other ranks have one, it is made here."""
    sizes = [local(parameter).numel() for parameter in parameters]
    device = local(parameters[0]).device
    flat = torch.cat(
        [
            torch.zeros(size, dtype=dtype, device=device)
            if parameter.grad is None
            else local(parameter.grad).flatten()
            for parameter, size in zip(parameters, sizes, strict=True)
        ]
    )
    have = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=dtype, device=device)
    total = summed(torch.cat((flat, have)), group)
    for index, (parameter, values) in enumerate(
        zip(parameters, total[: flat.numel()].split(sizes), strict=True)
    ):
        if parameter.grad is None and total[flat.numel() + index] > 0:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            part = local(parameter.grad)
            part.copy_(values.view_as(part))


def different_gradients(parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> list[str]:
    """The names of gradients that differ between the ranks by more than rounding."""
    if not parameters:
        return []
    sizes = torch.stack(
        [
            torch.zeros((), dtype=torch.float64, device=local(parameter).device)
            if parameter.grad is None
            else torch.linalg.vector_norm(local(parameter.grad), dtype=torch.promote_types(
                parameter.grad.dtype, torch.float32)).double()
            for parameter in parameters.values()
        ]
    ).nan_to_num()  # fmt: skip
    largest, smallest = summed(torch.stack((sizes, -sizes)), group, op=dist.ReduceOp.MAX)
    differ = (largest + smallest > DIFFERENT * largest) & (largest > NOISE * largest.max())
    return [name for name, differs in zip(parameters, differ.tolist(), strict=True) if differs]


def local(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
