"""AdamW and the learning rate of any step, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW

from evenspan.config.base import TrainingConfig


def build_optimizer(parameters: Iterable[nn.Parameter], training: TrainingConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters, which may be DTensors."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return AdamW(
        trainable,
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
    )


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Linear warm-up to `lr`, then a cosine down to `lr * min_lr_ratio` at `max_iters`.

    `step` counts optimizer steps from 0. A resumed run needs no scheduler state.
    """
    if step < training.warmup_steps:
        return training.lr * (step + 1) / training.warmup_steps
    decay_steps = max(1, training.max_iters - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / decay_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return training.lr * (training.min_lr_ratio + (1.0 - training.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: AdamW, value: float) -> None:
    """Every parameter group takes `value` for its next step."""
    for group in optimizer.param_groups:
        group["lr"] = value
