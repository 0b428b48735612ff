"""Pools of ranks for the whole session, and numbers that repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evenspan.testing import RankPool, make_deterministic


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    make_deterministic()


@pytest.fixture(scope="session")
def world2() -> Iterator[RankPool]:
    """Two gloo ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def world4() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()
