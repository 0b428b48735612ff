"""What ranks run for the tests of whole steps of the causal Wan on the tensor axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from evenspan.config.base import TrainingConfig
from evenspan.data.batch import split_video_batch
from evenspan.model.wan import CausalWan
from evenspan.parallel.sharded import joined
from evenspan.testing import RankContext
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.layout import FrameLayout
from evenspan.train.build import model_config, place_model
from evenspan.train.ema import Ema
from evenspan.train.objective import build_objective
from evenspan.train.optimizer import build_optimizer
from evenspan.train.step import train_step
from tests.distributed.cases_parity import (
    Case,
    Parity,
    compare,
    config_of,
    global_batches,
    new_model,
    topology_of,
)

STEPS = 20
MAX_NORM = 0.5


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far `STEPS` optimizer steps of a layout are from one process, on one rank."""

    loss: float
    norm: float
    """Worst relative error of a step's gradient norm before clipping."""
    clipped: int
    """Steps whose gradient was clipped."""
    weights: float
    weights_name: str
    average: float
    between_ranks: float
    """Worst difference of a weight between this rank and any other."""


def drifts(ctx: RankContext, cases: list[Case]) -> list[Drift]:
    """One Drift a case; run on every rank."""
    del ctx
    return [drift(case) for case in cases]


def drift(case: Case) -> Drift:
    """`STEPS` steps of AdamW with clipping and an average, against one process."""
    results, weights, average = trained(case, alone=True)
    own_results, own_weights, own_average = trained(case, alone=False)
    errors = {name: relative(own_weights[name], weight) for name, weight in weights.items()}
    worst = max(errors, key=lambda name: errors[name])
    pairs = list(zip(own_results, results, strict=True))
    return Drift(
        loss=max(abs(own.loss - one.loss) / abs(one.loss) for own, one in pairs),
        norm=max(abs(own.grad_norm - one.grad_norm) / one.grad_norm for own, one in pairs),
        clipped=sum(one.grad_norm > MAX_NORM for one in results),
        weights=errors[worst],
        weights_name=worst,
        average=max(relative(own_average[name], value) for name, value in average.items()),
        between_ranks=max(spread(value) for value in own_weights.values()),
    )


def trained(case: Case, *, alone: bool):
    """Facts of each step, whole weights and whole averages at the end."""
    config = config_of(case, context=1 if alone else case.context)
    world = case.context * case.dp * case.tensor
    if alone:
        layout = FrameLayout(
            frames=case.frames, frame_per_block=case.frame_per_block, context=1, padding=True
        )
    else:
        degrees = solve_degrees(config, world_size=world)
        layout = frame_layout(config, tensor=degrees.tensor)
        topology = topology_of(degrees)
    model = new_model(config, core="dense" if alone else "auto")
    batches = global_batches(case, text_dim=model_config(config).text_dim)
    if not alone:
        place_model(model, config, topology)
        start = topology.coordinates.dp * case.micro_batches
        batches = [
            split_video_batch(batch, layout=layout, context_rank=topology.coordinates.context)
            for batch in batches[start : start + case.micro_batches]
        ]
    optimizer = build_optimizer(model.parameters(), TrainingConfig(lr=1e-3))
    ema = Ema(model, decay=0.9, start_step=2)
    objective = build_objective(config, layout, seed=3)
    results = []
    for step in range(STEPS):
        results.append(
            train_step(
                model,
                optimizer,
                batches,
                objective,
                step=step,
                max_grad_norm=MAX_NORM,
                loss_group=None if alone else topology.loss_group,
            )
        )
        ema.update(model, step=step + 1)
    return results, whole(model), {name: joined(value) for name, value in ema.shadow.items()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every weight, joined from its shards."""
    return {name: joined(parameter.detach()) for name, parameter in model.named_parameters()}


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def spread(x: Tensor) -> float:
    """The largest difference of `x` between ranks."""
    low, high = x.clone(), x.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low).abs().max().item()


def drift_without_completion(ctx: RankContext, case: Case) -> Drift:
    """Mutant: nobody sums what replicated parameters lack."""
    del ctx
    from evenspan.train import step

    complete = step.complete_gradients
    step.complete_gradients = lambda _model: 0
    try:
        return drift(case)
    finally:
        step.complete_gradients = complete


def parity_without(ctx: RankContext, case: Case, owner: str, child: str) -> Parity:
    """Mutant: the tensor plan lacks one entry."""
    del ctx
    whole = CausalWan.TP_MODULE_CONFIG
    CausalWan.TP_MODULE_CONFIG = {
        name: {key: value for key, value in children.items() if (name, key) != (owner, child)}
        for name, children in whole.items()
    }
    try:
        return compare(case)
    finally:
        CausalWan.TP_MODULE_CONFIG = whole
