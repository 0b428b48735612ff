"""The numbers of one side of a proof: the one process, or this rank's part of a layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.comm.collectives import all_reduce_sum, gathered
from evenspan.comm.meter import CommMeter
from evenspan.parallel.clip import clip_grad_norm
from evenspan.parallel.fsdp import set_requires_gradient_sync
from evenspan.parallel.sharded import joined
from evenspan.parallel.tensor import complete_gradients
from evenspan.proof.case import Case, scored
from evenspan.topology.degrees import Axis
from evenspan.topology.mesh import Topology

STEPS = 3
"""Optimizer steps after which weights are compared."""

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
}


@dataclass(kw_only=True)
class Side:
    """What one side measured. Gradients and weights are whole tensors by parameter name."""

    losses: dict[int, float] = field(default_factory=dict)
    """The global mean loss by the number of backwards before it was read."""
    count: float = 0.0
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By the number of backwards since `zero_grad`."""
    norm: float = 0.0
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """After STEPS clipped steps, by optimizer."""
    replicas: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """After them, per parameter: which shard this rank holds, and a hash of it."""
    per_token: list[Tensor] = field(default_factory=list)
    """Losses [B, T] of each micro-batch of this data slot, all T tokens."""
    observed: list[dict[str, Tensor]] = field(default_factory=list)
    probes: dict[int, Tensor] = field(default_factory=dict)
    """Losses [B, T] of the first micro-batch after one token was changed, by token."""
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of the first tensor that each module got, by module name."""
    calls: dict[str, int] = field(default_factory=dict)
    """Forwards of each module while gradients were accumulated once."""
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Collectives of one accumulation by kind: calls and bytes sent."""
    batches: list[str] = field(default_factory=list)
    """A hash of each whole micro-batch."""


class Measuring:
    """One side while it is measured. Without a topology it is the one process with the whole global batch."""

    def __init__(
        self, case: Case, model: nn.Module, batches: Sequence[Any], topology: Topology | None
    ) -> None:
        self.case = case
        self.model = model
        self.topology = topology
        self.side = Side(batches=[fingerprint(batch) for batch in batches])
        self.batches = [self._share(batch) for batch in batches]
        self.loss_group = None if topology is None else topology.loss_group

    def run(self, *, max_norm: float | None = None) -> Side:
        """Measure everything. `max_norm` clips the optimizer steps; half the norm if it is not given."""
        self._look()
        for backwards in (1, 2):
            self.model.zero_grad(set_to_none=True)
            self._accumulate(backwards)
            self.side.gradients[backwards] = self._whole_gradients()
            if backwards == 1:
                self.side.norm = self._clip(float("inf"))
        limit = self.side.norm / 2 if max_norm is None else max_norm
        start = [_local(parameter).detach().clone() for parameter in self.model.parameters()]
        for name, optimizer in OPTIMIZERS.items():
            self._steps(optimizer(self.model.parameters()), limit)
            self.side.weights[name] = self._whole_weights()
            self.side.replicas.update({f"{name}: {key}": value for key, value in self._replicas().items()})
            for parameter, value in zip(self.model.parameters(), start, strict=True):
                _local(parameter).detach().copy_(value)
        return self.side

    # -- forward only ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _look(self) -> None:
        """What a forward shows: token losses, counts, positions, who sees whom, local shapes."""
        with _recording(self.model, self.side.inputs, self.side.calls):
            results = [scored(self.case, self.model, batch) for batch in self.batches]
        counts = torch.tensor([float(result.count) for result in results], dtype=torch.float64).sum()
        self.side.count = all_reduce_sum(counts, group=self.loss_group).item()
        self.side.per_token = [
            self._whole_tokens(result.per_token) for result in results if result.per_token is not None
        ]
        if self.case.observe is not None:
            for batch in self.batches:
                facts = self.case.observe(batch)
                self.side.observed.append({name: self._whole_tokens(fact) for name, fact in facts.items()})
        for token in probed_tokens(self.case):
            assert self.case.perturb is not None
            result = scored(self.case, self.model, self.case.perturb(self.batches[0], token))
            if result.per_token is not None:
                self.side.probes[token] = self._whole_tokens(result.per_token)

    def _share(self, batch: Any) -> Any:
        if self.topology is None or self.case.shard is None:
            return batch
        return self.case.shard(batch, self.topology)

    def _whole_tokens(self, values_BT: Tensor) -> Tensor:
        group = None if self.topology is None else self.topology.group(Axis.CONTEXT)
        return values_BT if group is None else gathered(values_BT, 1, group)

    # -- gradients ------------------------------------------------------------------------------------------

    def _accumulate(self, backwards: int) -> None:
        """Gradients of `backwards` accumulations of the whole global batch, complete at the end."""
        for number in range(1, backwards + 1):
            with CommMeter() as meter:
                loss = self._accumulate_once()
            self.side.losses[number] = loss
        if backwards == 1:
            for (kind, _), entry in meter.traffic.items():
                calls, sent = self.side.traffic.get(kind, (0, 0))
                self.side.traffic[kind] = (calls + entry.calls, sent + entry.bytes_sent)
        complete_gradients(self.model, compare=False)

    def _accumulate_once(self) -> float:
        if self.case.accumulate is not None:
            loss, _ = self.case.accumulate(self.model, self.batches, self.loss_group)
            return loss.item()
        divisor = max(self.side.count, 1.0)
        total = torch.zeros((), dtype=torch.float64)
        for position, batch in enumerate(self.batches):
            set_requires_gradient_sync(self.model, position == len(self.batches) - 1)
            result = scored(self.case, self.model, batch)
            (result.sum / divisor).backward()
            total = total + result.sum.detach().double()
        return all_reduce_sum(total, group=self.loss_group).item() / divisor

    def _steps(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            self._accumulate_once()
            complete_gradients(self.model, compare=False)
            self._clip(max_norm)
            optimizer.step()

    def _clip(self, max_norm: float) -> float:
        return clip_grad_norm(self.model.parameters(), max_norm=max_norm).item()

    def _whole_gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                found[name] = torch.zeros_like(whole(parameter).detach())
            else:
                found[name] = whole(gradient).detach().clone()
        return found

    def _whole_weights(self) -> dict[str, Tensor]:
        return {name: whole(parameter).detach().clone() for name, parameter in self.model.named_parameters()}

    def _replicas(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {
            name: (_place(parameter), fingerprint(_local(parameter)))
            for name, parameter in self.model.named_parameters()
        }


def probed_tokens(case: Case) -> tuple[int, ...]:
    """The tokens that are changed one by one: an early one, and one past the middle."""
    if case.perturb is None or case.tokens is None:
        return ()
    return tuple(sorted({case.tokens // 4, case.tokens * 5 // 8}))


def whole(x: Tensor) -> Tensor:
    """All of a distributed tensor; a collective."""
    return joined(x)


def fingerprint(value: Any) -> str:
    """A hash of every tensor and plain value in nested containers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _leaves(value):
        if isinstance(part, torch.Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _leaves(getattr(value, entry.name))
    else:
        yield value


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _place(x: Tensor) -> tuple[int, ...]:
    """Where this rank stands on the mesh dims over which `x` is split."""
    if not isinstance(x, DTensor):
        return ()
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    return tuple(
        place
        for place, placement in zip(coordinate, x.placements, strict=True)
        if not placement.is_replicate()
    )


@contextmanager
def _recording(model: nn.Module, inputs: dict[str, tuple[int, ...]], calls: dict[str, int]) -> Any:
    """Note the shape of the first tensor of each module's first call, and count calls."""

    def recorder(name: str) -> Any:
        def record(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls[name] = calls.get(name, 0) + 1
            tensors = [item for item in (*arguments, *keywords.values()) if isinstance(item, torch.Tensor)]
            if tensors:
                inputs.setdefault(name, tuple(_local(tensors[0]).shape))

        return record

    handles = [
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
