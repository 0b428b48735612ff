"""Assertions on what ranks returned: each passes on what is right and names ranks and values otherwise."""

from __future__ import annotations

import pytest

from evenspan.testing import (
    assert_close,
    assert_equal_on_ranks,
    assert_finite,
    assert_local_length,
    assert_same_samples,
)
from evenspan.topology.degrees import Degrees


def test_finite() -> None:
    assert_finite([1.0, -2.0], what="loss")
    with pytest.raises(AssertionError, match="loss 1 is nan"):
        assert_finite([1.0, float("nan")], what="loss")


def test_close() -> None:
    assert_close([1.0 + 1e-12], [1.0], tolerance=1e-10, what="loss")
    with pytest.raises(AssertionError, match=r"loss 0: 1.1 is not 1.0"):
        assert_close([1.1], [1.0], tolerance=1e-10, what="loss")
    with pytest.raises(AssertionError, match="1 values, expected 2"):
        assert_close([1.0], [1.0, 2.0], tolerance=1e-10, what="loss")
    with pytest.raises(AssertionError, match="nan"):
        assert_close([float("nan")], [1.0], tolerance=1e-10, what="loss")


def test_equal_on_ranks() -> None:
    assert_equal_on_ranks([3, 3, 3], what="loss")
    with pytest.raises(AssertionError, match=r"loss differs on ranks \[2\]: rank 0 has 3, rank 2 4"):
        assert_equal_on_ranks([3, 3, 4], what="loss")


def test_local_length() -> None:
    assert_local_length([(1, 4, 8), (1, 4, 8)], dim=1, total=8, degree=2, what="norm1")
    with pytest.raises(AssertionError, match=r"norm1, rank 1.*requested degree 2, observed 1"):
        assert_local_length([(1, 4, 8), (1, 8, 8)], dim=1, total=8, degree=2, what="norm1")


def test_same_samples() -> None:
    degrees = Degrees(shard=2, tensor=2)
    assert_same_samples(["x", "x", "y", "y"], degrees=degrees)
    with pytest.raises(AssertionError, match="ranks 2 and 3 share data slot 1 but read 'y' and 'z'"):
        assert_same_samples(["x", "x", "y", "z"], degrees=degrees)
    with pytest.raises(AssertionError, match="ranks 0 and 2 have different data slots but both read 'x'"):
        assert_same_samples(["x", "x", "x", "x"], degrees=degrees)
