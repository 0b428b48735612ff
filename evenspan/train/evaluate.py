"""Clips generated during and after training, from a copy of the weights: training state is never touched."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.topology.mesh import wait_for_rank_0
from evenspan.train.checkpoint import Progress
from evenspan.train.clips import clip_requests, make_clip
from evenspan.train.metrics import Reporter
from evenspan.train.run import Run

logger = logging.getLogger("evenspan")


def evaluate(run: Run, reporter: Reporter | None, progress: Progress) -> None:
    """Rank 0 generates one clip per prompt from a copy of the weights; the others wait."""
    shadow = run.ema.shadow if run.config.evaluation.use_ema else None
    weights = gather_weights(run.model, shadow)
    if reporter is not None:
        for number, request in enumerate(clip_requests(run.config, run.dataset)):
            out = run.directory.samples / f"step_{progress.step:08d}_{number}.gif"
            seed, device = run.config.logging.seed, run.topology.device
            make_clip(weights, run.config, request, out=out, seed=seed, device=device)
            reporter.record("evaluation", progress.step, {"prompt": request.label, "clip": out.name})
            logger.info("clip %s", out)
    wait_for_rank_0(f"evaluation {progress.step}")


def gather_weights(model: nn.Module, shadow: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The full weights (averaged when `shadow` is given) on global rank 0's CPU; an empty dict elsewhere.

    Collective: one all-gather per parameter, one parameter in memory at a time beside the result.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        source = parameter.detach() if shadow is None else shadow[name]
        full = source.full_tensor() if isinstance(source, DTensor) else source
        if dist.get_rank() == 0:
            weights[name] = full.to(device="cpu", dtype=torch.float32)
    return weights
