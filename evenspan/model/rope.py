"""Rotary position embedding over time, height and width, from whole-numbered positions.

A token's temporal position travels with the batch, so a rank that holds frames 24..47 rotates them by 24..47
without knowing that it is a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenspan.errors import ModelError

_BASE = 10000.0


def rope_table(
    positions_BF: Tensor,
    *,
    rows: int,
    columns: int,
    dims: tuple[int, int, int],
    max_positions: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, F * rows * columns, D / 2] of every token (order f, h, w), from fp64 angles.

    `positions_BF` holds global frame positions, `dims` the features each axis turns. Raises ModelError M104
    for a position outside 0 .. max_positions - 1.
    """
    low, high = (int(bound) for bound in torch.aminmax(positions_BF))
    if low < 0 or high >= max_positions:
        raise ModelError(
            "M104",
            f"frame positions run from {low} to {high}; the model knows 0 to {max_positions - 1}",
            hint=f"use at most {max_positions} latent frames, or raise the model field rope_max_seq_len",
        )
    if max(rows, columns) > max_positions:
        raise ModelError(
            "M104",
            f"a frame of {rows} x {columns} tokens exceeds {max_positions} positions per axis",
            hint="use smaller frames, or raise the model field rope_max_seq_len",
        )
    device = positions_BF.device
    batch, frames = positions_BF.shape
    grid = (batch, frames, rows, columns)
    time = _angles(positions_BF, dims[0])[:, :, None, None].expand(*grid, -1)
    height = _angles(torch.arange(rows, device=device), dims[1])[:, None].expand(*grid, -1)
    width = _angles(torch.arange(columns, device=device), dims[2]).expand(*grid, -1)
    angles = torch.cat((time, height, width), dim=-1).flatten(1, 3)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotate adjacent feature pairs of every head; T may be a whole multiple of the table's tokens.

    Clean and noisy copies of a frame share positions, so the table of one copy serves both.
    """
    copies = x_BTHD.shape[1] // cos_BTD.shape[1]
    cos = cos_BTD[:, None, :, None]
    sin = sin_BTD[:, None, :, None]
    pairs = x_BTHD.unflatten(1, (copies, -1)).unflatten(-1, (-1, 2))
    even, odd = pairs.to(cos.dtype).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).flatten(1, 2).to(x_BTHD.dtype)


def _angles(positions: Tensor, dim: int) -> Tensor:
    """positions[..., None] * 10000^(-2i / dim), i < dim / 2."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return positions[..., None].to(torch.float64) / _BASE**exponents
