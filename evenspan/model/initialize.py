"""Fresh weights that depend on a seed and on parameter names, on nothing else."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from evenspan.model.wan import CausalWan

_SMALL_NORMAL = ("condition_embedder.time_embedder.", "condition_embedder.text_embedder.")
_SMALL_STD = 0.02


def init_weights(model: CausalWan, *, seed: int, head_std: float = 0.0) -> None:
    """Write upstream Wan's initialisation into `model`: equal on every rank and for every dtype.

    Xavier-uniform linear layers and patch embedding, normal(0.02) time and text embedders, modulation tables
    normal(1 / sqrt(E)), biases 0, gains 1. The head is zero, so a fresh model predicts 0; a `head_std` above
    0 makes every gradient non-zero from the first step (parity tests).
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, seed=seed, head_std=head_std))


def _values(name: str, parameter: nn.Parameter, *, seed: int, head_std: float) -> Tensor:
    shape = parameter.shape
    # Drawn in fp32 on the CPU whatever the model's dtype and device: one model, not one per placement.
    generator = torch.Generator().manual_seed(_key(seed, name))
    if name.endswith("scale_shift_table"):
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "proj_out.weight":
        return head_std * torch.randn(shape, generator=generator)
    if name.startswith(_SMALL_NORMAL):
        return _SMALL_STD * torch.randn(shape, generator=generator)
    fan_out, fan_in = shape[0], math.prod(shape[1:])
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    return bound * (2.0 * torch.rand(shape, generator=generator) - 1.0)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
