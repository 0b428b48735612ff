"""What a run shows during and after training, made from a copy of the weights: its state is never touched."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenspan.parallel.sharded import joined
from evenspan.topology.mesh import wait_for_rank_0
from evenspan.train.checkpoint import Progress
from evenspan.train.metrics import Reporter
from evenspan.train.run import Run

logger = logging.getLogger("evenspan")


def evaluate(run: Run, reporter: Reporter | None, progress: Progress) -> None:
    """Rank 0 evaluates a copy of the weights (video: one clip per prompt); the others wait."""
    shadow = run.ema.shadow if run.task.evaluates_average else None
    weights = gather_weights(run.model, shadow)
    if reporter is not None:
        name, directory = f"step_{progress.step:08d}", run.directory.samples
        for facts in run.task.evaluate(weights, name=name, directory=directory, device=run.topology.device):
            reporter.record("evaluation", progress.step, facts)
            logger.info("evaluation in %s: %s", directory, facts)
    wait_for_rank_0(f"evaluation {progress.step}")


def gather_weights(model: nn.Module, shadow: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The full weights (averaged when `shadow` is given) on global rank 0's CPU; an empty dict elsewhere.

    Collective: one all-gather per parameter, one parameter in memory at a time beside the result.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        source = parameter.detach() if shadow is None else shadow[name]
        full = joined(source)
        if dist.get_rank() == 0:
            weights[name] = full.to(device="cpu", dtype=torch.float32)
    return weights
