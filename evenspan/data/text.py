"""Prompts as tensors, without weights: enough to tell captions apart where no language model is at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evenspan.data.draws import DrawKey
from evenspan.errors import DataError

POSITION_NORM = 0.5
"""Length of the position part beside the content's 1, so that captions, not positions, dominate."""


class TextEncoder(Protocol):
    """What a data set needs from a text encoder."""

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """[N, L, E] of N prompts; the same prompt gives the same tensor."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTextEncoder:
    """Fixed pseudo-random vectors of a text's bytes, folded into `length` slots, plus positions."""

    dim: int
    """Width E of a text token."""
    length: int
    """Text tokens L per prompt."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dim < 2 or self.length < 1:
            raise DataError(
                "D703",
                f"a text encoder of dim={self.dim} and length={self.length}",
                hint="use dim >= 2 and length >= 1",
            )

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """[N, L, E] fp32 of N prompts. Every byte counts: byte i goes to slot i mod L in turn i div L."""
        positions = _positions(self.length, dim=self.dim)
        if not prompts:
            return positions.new_zeros(0, self.length, self.dim)
        return torch.stack([self._content(prompt) + positions for prompt in prompts])

    def _content(self, prompt: str) -> Tensor:
        """[L, E]: unit vectors in the slots that a byte fell into, zero elsewhere."""
        symbols = torch.tensor(list(prompt.encode(errors="surrogatepass")), dtype=torch.long)
        content = torch.zeros(self.length, self.dim)
        for turn, chunk in enumerate(symbols.split(self.length)):
            # Each turn has vectors of its own: text beyond L bytes is not lost, nor confused with the start.
            generator = DrawKey(seed=self.seed, block=turn, purpose="byte vectors").generator()
            table = torch.randn(256, self.dim, generator=generator)
            content[: len(chunk)] += torch.nn.functional.normalize(table, dim=1)[chunk]
        return torch.nn.functional.normalize(content, dim=1)


def _positions(length: int, *, dim: int) -> Tensor:
    """[L, E] sines and cosines (Vaswani et al. 2017, section 3.5), of norm POSITION_NORM."""
    half = (dim + 1) // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10000.0) / half))
    angles = torch.arange(length)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]
    return torch.nn.functional.normalize(waves, dim=1) * POSITION_NORM
