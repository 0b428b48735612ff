"""One optimizer step: every micro-batch's share of one global mean, one clip, one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from evenspan.comm.collectives import all_reduce_sum
from evenspan.errors import RunError
from evenspan.parallel.clip import clip_grad_norm
from evenspan.parallel.fsdp import set_requires_gradient_sync
from evenspan.parallel.tensor import complete_gradients
from evenspan.train.task import BatchT, Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Facts of one optimizer step, equal on every rank."""

    loss: float
    """Mean over all valid frames or tokens of the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    loss_count: int
    """Valid frames or tokens the mean was taken over."""


def accumulate_gradients(
    model: nn.Module,
    batches: Sequence[BatchT],
    objective: Objective[BatchT],
    *,
    step: int,
    loss_group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the global batch's mean loss; return that loss and its count, on every rank.

    The count is known from the masks before any forward, so each micro-batch is divided by the final count:
    the result is the mean over valid frames or tokens of the whole global batch, however they fall on ranks
    and micro-batches. Gradients are reduced once, at the last micro-batch.
    """
    valid = torch.stack([objective.valid(batch).sum() for batch in batches]).sum()
    count = all_reduce_sum(valid.to(torch.float64), group=loss_group)
    divisor = count.clamp_min(1.0)
    total = torch.zeros_like(divisor)
    for position, batch in enumerate(batches):
        set_requires_gradient_sync(model, position == len(batches) - 1)
        loss = objective.loss(model, batch, step=step)
        (loss.sum / divisor.to(loss.sum.dtype)).backward()
        total = total + loss.sum.detach().to(torch.float64)
    return all_reduce_sum(total, group=loss_group) / divisor, count


def train_step(
    model: nn.Module,
    optimizer: AdamW,
    batches: Sequence[BatchT],
    objective: Objective[BatchT],
    *,
    step: int,
    max_grad_norm: float,
    loss_group: ProcessGroup | None,
) -> StepResult:
    """Run optimizer step `step` (counted from 0) on this rank's micro-batches.

    Raises RunError R103, before the weights change, when the loss or the gradient norm is not finite; all
    ranks see the same reduced numbers, so all of them raise.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, count = accumulate_gradients(model, batches, objective, step=step, loss_group=loss_group)
    complete_gradients(model)
    norm = clip_grad_norm(model.parameters(), max_norm=max_grad_norm)
    loss_value, norm_value = loss.item(), norm.item()
    if not (torch.isfinite(loss).item() and torch.isfinite(norm).item()):
        samples = sorted({sample for batch in batches for sample in batch.sample_ids})
        raise RunError(
            "R103",
            f"step {step + 1}: loss {loss_value}, gradient norm {norm_value}; this rank's samples {samples}",
            hint="weights are as after the step before; lower training.lr or look at those samples",
        )
    optimizer.step()
    return StepResult(loss=loss_value, grad_norm=norm_value, loss_count=int(count.item()))
