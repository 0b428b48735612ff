"""Gradients of parameters that every tensor rank holds whole: which need a sum over the ranks, and the sum.

A parameter whose module worked on this rank's tokens or features has this rank's part of its gradient; one
whose module did the same work on every rank has all of it. The first kind is summed exactly once.
"""

from __future__ import annotations

import weakref
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.comm.collectives import summed
from evenspan.errors import PlanError


class Completion(StrEnum):
    """What the gradient of a replicated parameter lacks."""

    NONE = "none"
    """Nothing: every rank has it whole."""
    SUM = "sum"
    """The other ranks' parts."""


class Ledger:
    """What is known of each replicated parameter of one model, and which gradients were completed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.completions: dict[str, Completion] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._done: dict[str, weakref.ref[Tensor]] = {}
        self._by_hook: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._hooked = False

    def note(self, name: str, completion: Completion) -> None:
        """Record what parameter `name` needs. Raises P116 when another call of it needed something else."""
        known = self.completions.setdefault(name, completion)
        if known is not completion:
            raise PlanError(
                "P116",
                f"{name} worked on shards in one call and on whole tensors in another",
                hint="give each use a module of its own, or move one of them across the region's boundary",
            )

    def bind(self, model: nn.Module, *, split: frozenset[str]) -> None:
        """Hold the parameters by name, as they are after FSDP2; those in `split` are complete anyway."""
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in split
        }

    def incomplete(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are parts."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if self.completions.get(name) is Completion.SUM
        }

    def forget_zeroed(self) -> None:
        """Gradients that were set to zero in place may be completed again."""
        for name in list(self._done):
            gradient = self._done[name]()
            if gradient is None or not local(gradient).any():
                del self._done[name]

    def complete(self) -> int:
        """Sum the partial gradients over the tensor ranks, in one all-reduce per dtype; how many there were.

        Call once per optimizer step, after the last backward and before clipping. A collective over the
        tensor group. Raises P115 when a gradient was completed already.
        """
        gradients = {
            name: parameter.grad
            for name, parameter in self.incomplete().items()
            if parameter.grad is not None
        }
        for name, gradient in gradients.items():
            done = self._done.get(name)
            if self._hooked or (done is not None and done() is gradient):
                raise PlanError(
                    "P115",
                    f"the gradient of {name} was summed over the {self.group.size()} tensor ranks already",
                    hint="call complete_gradients once between zero_grad and the optimizer step"
                    if not self._hooked
                    else "hooks sum it in every backward: leave complete_gradients out",
                )
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        seen: set[int] = set()
        for name, gradient in gradients.items():
            self._done[name] = weakref.ref(gradient)
            if id(gradient) not in seen:
                seen.add(id(gradient))
                by_dtype.setdefault(gradient.dtype, []).append(local(gradient))
        for parts in by_dtype.values():
            total = summed(torch.cat([part.flatten() for part in parts]), self.group)
            for part, values in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view_as(part))
        return len(gradients)

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
        if gradient is None or self.completions.get(name) is not Completion.SUM:
            return
        part = local(gradient)
        known = self._by_hook.get(name)
        before = known[1] if known is not None and known[0]() is gradient else torch.zeros_like(part)
        part.copy_(before + summed(part - before, self.group))
        self._by_hook[name] = (weakref.ref(gradient), part.clone())


class _Hook:
    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __call__(self, parameter: Tensor) -> None:
        self._ledger.complete_added(self._name, parameter)


def local(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
