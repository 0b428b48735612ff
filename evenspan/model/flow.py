"""Flow matching: noise levels, what the model regresses, and the loss as a sum and a count.

x_t = (1 - sigma) x_0 + sigma e, target v = e - x_0 (Lipman et al. 2023, rectified form). Levels, shift and
weights are those LongLive trains with: sigma_i = s u_i / (1 + (s - 1) u_i), u_i = 1 - i / steps,
t_i = 1000 sigma_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenspan.errors import ModelError
from evenspan.model.numerics import at_least_fp32

TIMESTEP_SCALE = 1000.0
"""The DiT sees t = 1000 sigma whatever the number of levels."""


class FlowSchedule:
    """The table of noise levels, from pure noise (index 0) to almost clean (index steps - 1), in fp64.

    An index drives everything; sigma is never recovered from a rounded timestep (bf16 would merge 1000 levels
    into 294).
    """

    def __init__(self, *, shift: float, steps: int = 1000) -> None:
        if steps < 1 or shift <= 0:
            raise ModelError(
                "M105",
                f"a schedule of {steps} steps with shift {shift}",
                hint="steps must be at least 1 and shift above 0",
            )
        self.shift = shift
        self.steps = steps
        self.sigmas = _sigmas(shift=shift, steps=steps)
        self.timesteps = TIMESTEP_SCALE * self.sigmas
        bell = torch.exp(-2.0 * ((self.timesteps - TIMESTEP_SCALE / 2) / TIMESTEP_SCALE) ** 2)
        raised = bell - bell.min()
        # One level only: nothing to weigh against, and 0 / 0 otherwise.
        self.weights = raised * (steps / raised.sum()) if steps > 1 else torch.ones_like(raised)

    def sigma(self, index_BF: Tensor) -> Tensor:
        """sigma of each frame, fp64, [B, F]."""
        return self.sigmas.to(index_BF.device)[index_BF]

    def timestep(self, index_BF: Tensor) -> Tensor:
        """t = 1000 sigma of each frame, fp64, [B, F]: what the model is told."""
        return self.timesteps.to(index_BF.device)[index_BF]

    def weight(self, index_BF: Tensor) -> Tensor:
        """Training weight of each frame, fp64, [B, F]; mean 1 over the table, 0 at pure noise."""
        return self.weights.to(index_BF.device)[index_BF]

    def add_noise(self, clean_BFCHW: Tensor, noise_BFCHW: Tensor, *, index_BF: Tensor) -> Tensor:
        """x_t of each frame at its own level, in the dtype of the latents."""
        wide = at_least_fp32(clean_BFCHW)
        sigma = self.sigma(index_BF).to(wide.dtype)[:, :, None, None, None]
        return ((1.0 - sigma) * wide + sigma * noise_BFCHW.to(wide.dtype)).to(clean_BFCHW.dtype)

    def augmentation_range(self, max_timestep: int) -> tuple[int, int]:
        """Indices [start, stop) for slight noise on the clean copies: the `max_timestep` cleanest levels.

        0 means no augmentation: an empty range. Raises ModelError M105 beyond the table.
        """
        if not 0 <= max_timestep <= self.steps:
            raise ModelError(
                "M105",
                f"noise_augmentation_max_timestep is {max_timestep}; the schedule has {self.steps} steps",
                hint=f"use 0 (none) to {self.steps}",
            )
        return self.steps - max_timestep, self.steps

    def sampling_sigmas(self, steps: int) -> Tensor:
        """Levels of an Euler sampler with this shift, fp64, [steps + 1], from 1 down to exactly 0."""
        levels = FlowSchedule(shift=self.shift, steps=steps).sigmas
        return torch.cat((levels, levels.new_zeros(1)))


def velocity_target(clean: Tensor, noise: Tensor) -> Tensor:
    """v = e - x_0, the derivative of x_t by sigma."""
    return noise - clean


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss before division: add those of all parts, then divide once by the global count."""

    sum: Tensor
    """Sum over valid frames, a scalar that carries gradients."""
    count: Tensor
    """Number of valid frames, a scalar of the same dtype."""

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.sum + other.sum, self.count + other.count)


def flow_loss(
    prediction_BFCHW: Tensor, target_BFCHW: Tensor, *, weight_BF: Tensor, valid_BF: Tensor
) -> LossSum:
    """Sum over valid frames of weight x mean squared error over C, H, W, in at least fp32, and their number.

    An invalid frame gives exactly 0 and no gradient, whatever it holds.
    """
    prediction = at_least_fp32(prediction_BFCHW)
    difference = prediction - target_BFCHW.to(prediction.dtype)
    difference = difference.masked_fill(~valid_BF[:, :, None, None, None], 0.0)
    per_frame_BF = difference.square().mean(dim=(2, 3, 4))
    total = (per_frame_BF * weight_BF.to(per_frame_BF.dtype)).sum()
    return LossSum(total, valid_BF.sum().to(total.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowInputs:
    """What one training forward needs, per frame."""

    noisy_BFCHW: Tensor
    timesteps_BF: Tensor
    target_BFCHW: Tensor
    valid_BF: Tensor


def condition_on_frames(inputs: FlowInputs, *, clean_BFCHW: Tensor, conditioning_BF: Tensor) -> FlowInputs:
    """The inputs with the marked frames given (image to video): clean latent, t = 0, target 0, no loss."""
    mark = conditioning_BF[:, :, None, None, None]
    return FlowInputs(
        noisy_BFCHW=torch.where(mark, clean_BFCHW, inputs.noisy_BFCHW),
        timesteps_BF=inputs.timesteps_BF.masked_fill(conditioning_BF, 0.0),
        target_BFCHW=inputs.target_BFCHW.masked_fill(mark, 0.0),
        valid_BF=inputs.valid_BF & ~conditioning_BF,
    )


def _sigmas(*, shift: float, steps: int) -> Tensor:
    u = 1.0 - torch.arange(steps, dtype=torch.float64) / steps
    return shift * u / (1.0 + (shift - 1.0) * u)
