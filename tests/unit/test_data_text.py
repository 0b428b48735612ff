"""Captions become clearly different tensors, always the same ones."""

from __future__ import annotations

import pytest
import torch

from evenspan.data.text import ByteTextEncoder
from evenspan.errors import DataError


def test_same_text_same_tensor() -> None:
    encoder = ByteTextEncoder(dim=32, length=16)
    text = encoder.encode(["a red bird", "", "a red bird"])
    assert text.shape == (3, 16, 32)
    assert text.dtype == torch.float32
    assert torch.equal(text[0], text[2])
    assert torch.equal(text, ByteTextEncoder(dim=32, length=16).encode(["a red bird", "", "a red bird"]))
    assert not torch.equal(text, ByteTextEncoder(dim=32, length=16, seed=1).encode(["a red bird", "", "a"]))


def test_different_captions_differ_even_past_the_length() -> None:
    encoder = ByteTextEncoder(dim=64, length=8)
    same_start = "The scene transitions. "
    one, two, three = encoder.encode([same_start + "a rabbit", same_start + "a man in a car", same_start])
    for left, right in ((one, two), (one, three), (two, three)):
        assert (left - right).norm().item() > 0.5 * left.norm().item()


def test_empty_inputs() -> None:
    encoder = ByteTextEncoder(dim=8, length=4)
    assert encoder.encode([]).shape == (0, 4, 8)
    assert encoder.encode([""]).isfinite().all()
    with pytest.raises(DataError, match="D703"):
        ByteTextEncoder(dim=0, length=4)


def test_any_text_a_command_line_can_hold_is_encoded() -> None:
    broken = b"\xff".decode(errors="surrogateescape")
    assert ByteTextEncoder(dim=8, length=4).encode([broken]).isfinite().all()
