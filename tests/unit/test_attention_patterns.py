"""Patterns against their definitions, written here pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenspan.attention import patterns
from evenspan.attention.dense import dense_mask
from evenspan.attention.spans import Span
from evenspan.errors import AttentionError


def pairwise_mask(q_tokens: int, k_tokens: int, sees) -> Tensor:
    rows = [[bool(sees(q, k)) for k in range(k_tokens)] for q in range(q_tokens)]
    return torch.tensor(rows, dtype=torch.bool).reshape(q_tokens, k_tokens)


def teacher_forcing_mask(shares, *, frame_per_block, valid_frames, window=None, sink=0) -> Tensor:
    """Clean sees clean blocks <= own, noisy sees clean blocks < own and its own noisy block."""
    units: list[tuple[str, int]] = []
    for start, stop in shares:
        units += [("clean", f) for f in range(start, stop)]
        units += [("noisy", f) for f in range(start, stop)]

    def sees(q: int, k: int) -> bool:
        (q_kind, q_frame), (k_kind, k_frame) = units[q], units[k]
        if max(q_frame, k_frame) >= valid_frames:
            return False
        q_block, k_block = q_frame // frame_per_block, k_frame // frame_per_block
        if q_block == k_block:
            return q_kind == k_kind
        if k_kind == "noisy" or k_block > q_block:
            return False
        return window is None or k_frame < sink or k_frame >= q_block * frame_per_block - window

    return pairwise_mask(len(units), len(units), sees)


SHARES = [[(0, 8)], [(0, 4), (4, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 3), (3, 3), (3, 8)]]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("frame_per_block", [1, 2, 3, 4, 8, 11])
@pytest.mark.parametrize("valid_frames", [0, 5, 8])
@pytest.mark.parametrize(("window", "sink"), [(None, 0), (0, 0), (3, 0), (2, 3)])
def test_teacher_forcing(shares, frame_per_block, valid_frames, window, sink) -> None:
    options = {
        "frame_per_block": frame_per_block,
        "valid_frames": valid_frames,
        "window": window,
        "sink": sink,
    }
    table = patterns.teacher_forcing(shares, **options)
    assert torch.equal(dense_mask(table), teacher_forcing_mask(shares, **options))


def test_teacher_forcing_density_is_a_quarter_and_a_bit() -> None:
    for blocks in (1, 2, 8):
        table = patterns.teacher_forcing([(0, 4 * blocks)], frame_per_block=4)
        assert table.density == pytest.approx((1 + 1 / blocks) / 4)


def test_one_rank_needs_three_rectangles_per_block() -> None:
    table = patterns.teacher_forcing([(0, 12)], frame_per_block=4)
    clean = [s for s in table.spans if s.q_start < 12]
    assert clean == [Span(0, 4, 0, 4), Span(4, 8, 0, 8), Span(8, 12, 0, 12)]
    assert len(table.spans) == 3 + 2 * 3 - 1  # the first noisy block has no context


def test_a_layout_permutes_the_pattern() -> None:
    one = dense_mask(patterns.teacher_forcing([(0, 6)], frame_per_block=2))
    shares = [(0, 2), (2, 4), (4, 6)]
    three = dense_mask(patterns.teacher_forcing(shares, frame_per_block=2))
    order = [copy + f for a, b in shares for copy in (0, 6) for f in range(a, b)]
    assert torch.equal(three, one[order][:, order])


@pytest.mark.parametrize("frame_per_block", [1, 3, 4])
@pytest.mark.parametrize(("window", "sink"), [(None, 0), (0, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("valid_frames", [None, 7])
def test_block_causal(frame_per_block, window, sink, valid_frames) -> None:
    table = patterns.block_causal(
        8,
        frame_per_block=frame_per_block,
        window=window,
        sink=sink,
        shares=[(0, 5), (5, 8)],
        valid_frames=valid_frames,
    )
    valid = 8 if valid_frames is None else valid_frames

    def sees(q: int, k: int) -> bool:
        start = q // frame_per_block * frame_per_block
        if max(q, k) >= valid or k >= start + frame_per_block:
            return False
        return window is None or k >= start - window or k < sink

    assert torch.equal(dense_mask(table), pairwise_mask(8, 8, sees))


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (1, 0), (3, 0), (3, 2), (20, 0), (0, 1)])
def test_causal(window, sink) -> None:
    table = patterns.causal(9, window=window, sink=sink)

    def sees(q: int, k: int) -> bool:
        return k <= q and (window is None or q - k < window or k < sink)

    assert torch.equal(dense_mask(table), pairwise_mask(9, 9, sees))


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal) -> None:
    lengths = [3, 0, 1, 4]
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    mask = dense_mask(patterns.documents(lengths, causal=causal))
    assert torch.equal(
        mask, pairwise_mask(8, 8, lambda q, k: owner[q] == owner[k] and (k <= q or not causal))
    )


def test_full() -> None:
    assert dense_mask(patterns.full(3)).all()
    assert dense_mask(patterns.full(3, 5)).shape == (3, 5)
    assert patterns.full(3, 0).spans == ()
    assert patterns.causal(0).spans == ()


@pytest.mark.parametrize(
    "build",
    [
        lambda: patterns.teacher_forcing([(0, 3), (4, 6)], frame_per_block=1),
        lambda: patterns.teacher_forcing([(1, 3)], frame_per_block=1),
        lambda: patterns.teacher_forcing([(0, 3), (3, 1)], frame_per_block=1),
        lambda: patterns.teacher_forcing([(0, 3)], frame_per_block=0),
        lambda: patterns.teacher_forcing([(0, 3)], frame_per_block=1, valid_frames=4),
        lambda: patterns.teacher_forcing([(0, 3)], frame_per_block=1, window=-1),
        lambda: patterns.teacher_forcing([(0, 3)], frame_per_block=1, sink=-1),
        lambda: patterns.block_causal(4, frame_per_block=1, shares=[(0, 3)]),
        lambda: patterns.block_causal(-4, frame_per_block=1),
        lambda: patterns.documents([2, -1]),
        lambda: patterns.full(-1),
    ],
)
def test_bad_arguments_are_named(build) -> None:
    with pytest.raises(AttentionError, match="A103") as caught:
        build()
    assert caught.value.hint
