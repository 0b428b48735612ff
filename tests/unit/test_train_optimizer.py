"""The learning rate of a step, and the average of the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from evenspan.config.base import TrainingConfig
from evenspan.train.ema import Ema
from evenspan.train.optimizer import build_optimizer, learning_rate, set_learning_rate

TRAINING = TrainingConfig(lr=1.0, warmup_steps=4, max_iters=14, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),
        (3, 1.0),
        (4, 1.0),
        (9, 0.1 + 0.9 * 0.5),
        (13, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.9))),
        (99, 0.1),
    ],
)
def test_warm_up_then_cosine(step: int, expected: float) -> None:
    assert learning_rate(step, TRAINING) == pytest.approx(expected, rel=1e-12)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, TrainingConfig(lr=0.5, warmup_steps=0, max_iters=10)) == 0.5


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model.parameters(), TRAINING)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(model.weight)]
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_average_follows_until_its_start_then_lags() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = Ema(model, decay=0.75, start_step=1)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema.update(model, step=1)
    assert ema.shadow["weight"].item() == 2.0
    with torch.no_grad():
        model.weight.fill_(4.0)
    ema.update(model, step=2)
    assert ema.shadow["weight"].item() == pytest.approx(0.75 * 2.0 + 0.25 * 4.0)


def test_average_is_at_least_fp32() -> None:
    assert Ema(nn.Linear(1, 1).bfloat16(), decay=0.9, start_step=0).shadow["weight"].dtype == torch.float32
    assert Ema(nn.Linear(1, 1).double(), decay=0.9, start_step=0).shadow["weight"].dtype == torch.float64
