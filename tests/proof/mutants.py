"""Layouts with one mistake each; none of them changes the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.parallel.replicated import Completion
from evenspan.parallel.tensor import applied_plan
from evenspan.proof.case import Case, Layout, Scored
from evenspan.proof.place import place
from evenspan.topology.mesh import Topology
from tests.proof.cases import case, token_batch, token_loss

NORM = "layers.0.input_layernorm.weight"


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _hooked(act: Callable[[Tensor], None], name: str = NORM) -> Case:
    """Every backward ends with `act` on one parameter's gradient."""

    def spoiled(model: nn.Module, topology: Topology, layout: Layout) -> None:
        place(model, topology, layout)
        parameter = dict(model.named_parameters())[name]
        parameter.register_post_accumulate_grad_hook(lambda p: act(_local(p.grad)))

    return case(place=spoiled)


def _unsummed(match: str) -> Case:
    """Gradients of some parameters stay parts."""

    def spoiled(model: nn.Module, topology: Topology, layout: Layout) -> None:
        place(model, topology, layout)
        _take_for_whole(model, match)

    return case(place=spoiled)


def _take_for_whole(model: nn.Module, match: str) -> None:
    applied = applied_plan(model)
    assert applied is not None
    for name in applied.ledger.completions:
        if match in name:
            applied.ledger.completions[name] = Completion.NONE


def missing_sum() -> Case:
    """A norm that works on shards is taken for one that works on whole tensors."""
    return _unsummed(NORM)


def unsummed_head_norm() -> Case:
    """Gradients of q norms, which see this rank's heads, stay parts."""
    return _unsummed("q_norm")


def summed_twice() -> Case:
    """A split weight's gradient, complete on its rank, is summed over the ranks as well."""

    def act(gradient: Tensor) -> None:
        gradient.mul_(dist.get_world_size())

    return _hooked(act, "layers.0.self_attn.q_proj.weight")


def averaged() -> Case:
    """A gradient is divided by the ranks."""

    def act(gradient: Tensor) -> None:
        gradient.div_(dist.get_world_size())

    return _hooked(act, "layers.1.mlp.gate_proj.weight")


def reduced_again() -> Case:
    """A hook sums the whole gradient after every backward: right once, wrong from the second on."""

    def spoiled(model: nn.Module, topology: Topology, layout: Layout) -> None:
        place(model, topology, layout)
        _take_for_whole(model, NORM)
        parameter = dict(model.named_parameters())[NORM]

        def again(p: Tensor) -> None:
            assert p.grad is not None
            dist.all_reduce(_local(p.grad))

        parameter.register_post_accumulate_grad_hook(again)

    return case(place=spoiled)


def detached() -> Case:
    """No gradient arrives at one module."""

    def spoiled(model: nn.Module, topology: Topology, layout: Layout) -> None:
        place(model, topology, layout)
        model.get_submodule("layers.1.mlp").register_forward_hook(
            lambda _module, _args, output: output.detach()
        )

    return case(place=spoiled)


def ignored() -> Case:
    """A model that takes no notice of the layout: every rank does the whole work."""

    def nothing(model: nn.Module, topology: Topology, layout: Layout) -> None:
        del model, topology, layout

    return case(place=nothing)


def other_batches() -> Case:
    """A loader by global rank."""

    def by_rank(number: int) -> dict[str, Tensor]:
        return token_batch(number + (100 * dist.get_rank() if dist.is_initialized() else 0))

    return case(batch=by_rank)


def mean_of_local_means() -> Case:
    """Each replica divides its loss by its own count."""

    def accumulate(model: nn.Module, batches: Any, group: Any) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            result = token_loss(model, batch)
            mean = result.sum / result.count / len(batches)
            (mean / (group.size() if group is not None else 1)).backward()
            total = total + mean.detach()
        if group is not None:
            dist.all_reduce(total, group=group)
            total = total / group.size()
        return total, total

    def uneven(number: int) -> dict[str, Tensor]:
        batch = token_batch(number)
        batch["labels"][1, : 2 * number] = -100
        return batch

    def one_process_first(model: nn.Module, batches: Any, group: Any) -> tuple[Tensor, Tensor]:
        if group is not None:
            return accumulate(model, batches, group)
        count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = token_loss(model, batch).sum / count
            loss.backward()
            total = total + loss.detach()
        return total, total

    return case(accumulate=one_process_first, batch=uneven)


def unseeded() -> Case:
    """Batches that differ from call to call."""

    def draw(number: int) -> dict[str, Tensor]:
        del number
        return {**token_batch(0), "tokens": torch.randint(0, 24, (2, 8))}

    return case(batch=draw)


def drawing_forward() -> Case:
    """A loss that draws random numbers."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Scored:
        result = token_loss(model, batch)
        return Scored(sum=result.sum * torch.rand(()), count=result.count)

    return case(loss=loss)


def no_case() -> int:
    """Not a Case."""
    return 3
