"""An exponential moving average of the weights that is sharded as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ema:
    """The average of a model's parameters; each rank holds and updates only its own shards.

    `shadow` maps parameter names to tensors (DTensors where the parameters are) of at least fp32. Until
    `start_step` the average follows the weights exactly.
    """

    def __init__(self, model: nn.Module, *, decay: float, start_step: int) -> None:
        self.decay = decay
        self.start_step = start_step
        self.shadow: dict[str, Tensor] = {
            name: parameter.detach().to(_at_least_fp32(parameter.dtype)).clone()
            for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, *, step: int) -> None:
        """Move the average towards the weights after optimizer step `step` (counted from 1)."""
        decay = self.decay if step > self.start_step else 0.0
        for name, parameter in model.named_parameters():
            # Both sides are sharded alike, so this touches local memory only: no collective.
            self.shadow[name].lerp_(parameter.detach().to(self.shadow[name].dtype), 1.0 - decay)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
