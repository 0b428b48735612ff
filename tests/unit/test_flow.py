"""Noise levels, targets and the loss as a sum and a count."""

from __future__ import annotations

import pytest
import torch

from evenspan.errors import ModelError
from evenspan.model.flow import (
    FlowInputs,
    FlowSchedule,
    LossSum,
    condition_on_frames,
    flow_loss,
    velocity_target,
)

SCHEDULE = FlowSchedule(shift=5.0)


def test_table_values() -> None:
    """The figures of the published schedule: t from 1000 to 4.98, weights 0 to 2.076, last 0.032, mean 1."""
    timesteps, weights = SCHEDULE.timesteps, SCHEDULE.weights
    assert timesteps[0] == 1000
    assert float(timesteps[-1]) == pytest.approx(4.98, abs=0.01)
    assert bool((timesteps.diff() < 0).all())
    assert float(SCHEDULE.sigmas[500]) == pytest.approx(5 * 0.5 / 3, abs=1e-15)
    assert weights[0] == 0
    assert float(weights.max()) == pytest.approx(2.076, abs=5e-4)
    assert float(timesteps[weights.argmax()]) == pytest.approx(500, abs=2)
    assert float(weights[-1]) == pytest.approx(0.032, abs=5e-4)
    assert float(weights.mean()) == pytest.approx(1, abs=1e-12)
    assert timesteps.dtype == weights.dtype == torch.float64


def test_noise_and_target_are_consistent() -> None:
    clean, noise = torch.randn(
        2, 2, 3, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    index = torch.tensor([[0, 999, 500], [1, 2, 3]])
    noisy = SCHEDULE.add_noise(clean, noise, index_BF=index)
    sigma = SCHEDULE.sigma(index)[:, :, None, None, None]
    torch.testing.assert_close(noisy - sigma * velocity_target(clean, noise), clean, rtol=0, atol=1e-14)
    torch.testing.assert_close(noisy[0, 0], noise[0, 0], rtol=0, atol=0)


def test_levels_survive_bf16_latents() -> None:
    """All 1000 levels stay apart; rounding timesteps to bf16 would leave 294 of them."""
    clean, noise = torch.zeros(1, 2, 1, 1, 1).bfloat16(), torch.ones(1, 2, 1, 1, 1).bfloat16()
    assert SCHEDULE.add_noise(clean, noise, index_BF=torch.tensor([[0, 1]])).dtype == torch.bfloat16
    assert SCHEDULE.timestep(torch.arange(1000)[None]).unique().numel() == 1000
    assert SCHEDULE.timesteps.bfloat16().unique().numel() == 294


def test_augmentation_takes_the_clean_end() -> None:
    assert SCHEDULE.augmentation_range(100) == (900, 1000)
    assert SCHEDULE.augmentation_range(0) == (1000, 1000)
    assert SCHEDULE.sigmas[900] < SCHEDULE.sigmas[99]
    with pytest.raises(ModelError, match="M105 noise_augmentation_max_timestep is 1001"):
        SCHEDULE.augmentation_range(1001)
    with pytest.raises(ModelError, match="M105 a schedule of 0 steps"):
        FlowSchedule(shift=1.0, steps=0)


def test_sampling_levels_end_at_zero() -> None:
    sigmas = SCHEDULE.sampling_sigmas(4)
    expected = [5 * u / (1 + 4 * u) for u in (1, 0.75, 0.5, 0.25, 0)]
    assert sigmas.tolist() == pytest.approx(expected, abs=1e-15)


def _loss(valid: list[list[bool]]) -> tuple[LossSum, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    prediction = torch.randn(2, 3, 4, 2, 2, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64)
    loss = flow_loss(prediction, torch.zeros_like(prediction), weight_BF=weight, valid_BF=torch.tensor(valid))
    loss.sum.backward()
    assert prediction.grad is not None
    by_hand = (weight * prediction.detach().square().mean((2, 3, 4)))[torch.tensor(valid)].sum()
    torch.testing.assert_close(loss.sum.detach(), by_hand)
    return loss, prediction.grad


def test_loss_counts_valid_frames_only() -> None:
    loss, gradient = _loss([[True, False, True], [True, True, False]])
    assert loss.count == 4
    assert not gradient[0, 1].any()
    assert gradient[0, 0].any()
    assert _loss([[False] * 3] * 2)[0].sum == 0


def test_parts_add_up_to_the_whole() -> None:
    prediction, target = torch.randn(2, 2, 4, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    weight, valid = torch.rand(2, 4).double(), torch.tensor([[True] * 4, [True, True, False, False]])
    whole = flow_loss(prediction, target, weight_BF=weight, valid_BF=valid)
    left, right = (
        flow_loss(prediction[:, part], target[:, part], weight_BF=weight[:, part], valid_BF=valid[:, part])
        for part in (slice(0, 2), slice(2, 4))
    )
    total = left + right
    torch.testing.assert_close(total.sum, whole.sum, rtol=1e-14, atol=0)
    assert total.count == whole.count == 6


def test_an_invalid_frame_may_hold_anything() -> None:
    prediction = torch.full((1, 2, 1, 1, 1), float("nan"))
    prediction[:, 0] = 1.0
    prediction.requires_grad_()
    loss = flow_loss(
        prediction,
        torch.zeros(1, 2, 1, 1, 1),
        weight_BF=torch.ones(1, 2),
        valid_BF=torch.tensor([[True, False]]),
    )
    loss.sum.backward()
    assert loss.sum == 1
    assert prediction.grad is not None
    assert prediction.grad.flatten().tolist() == [2.0, 0.0]


def test_loss_is_at_least_fp32() -> None:
    zero = torch.zeros(1, 1, 1, 1, 1)
    args = {"weight_BF": torch.ones(1, 1), "valid_BF": torch.ones(1, 1, dtype=torch.bool)}
    assert flow_loss(zero.bfloat16(), zero.bfloat16(), **args).sum.dtype == torch.float32
    assert flow_loss(zero.double(), zero, **args).sum.dtype == torch.float64


def test_conditioning_frames() -> None:
    inputs = FlowInputs(
        noisy_BFCHW=torch.ones(1, 3, 1, 1, 1),
        timesteps_BF=torch.full((1, 3), 700.0),
        target_BFCHW=torch.full((1, 3, 1, 1, 1), 5.0),
        valid_BF=torch.tensor([[True, True, False]]),
    )
    mark = torch.tensor([[True, False, False]])
    made = condition_on_frames(inputs, clean_BFCHW=torch.full((1, 3, 1, 1, 1), 9.0), conditioning_BF=mark)
    assert made.noisy_BFCHW.flatten().tolist() == [9.0, 1.0, 1.0]
    assert made.timesteps_BF.flatten().tolist() == [0.0, 700.0, 700.0]
    assert made.target_BFCHW.flatten().tolist() == [0.0, 5.0, 5.0]
    assert made.valid_BF.flatten().tolist() == [False, True, False]
    assert inputs.noisy_BFCHW.flatten().tolist() == [1.0, 1.0, 1.0]
