"""pytest options and fixtures for recipes: overrides, world size, ranks, smoke runs.

Loads no torch by itself. Installed with the package, so that all recipes of a run share one set of options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from evenspan.errors import EvenspanError

if TYPE_CHECKING:
    from evenspan.testing import RankPool, Recipe, RecipeHooks, Smoke, Structure

_Value = TypeVar("_Value")

OVERRIDES, WORLD_SIZE, CONFIG_NAME = "evenspan_overrides", "evenspan_world_size", "evenspan_config_name"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a run over recipes."""
    group = parser.getgroup("evenspan", "recipes of evenspan")
    group.addoption(
        "--config-override",
        action="append",
        default=[],
        dest=OVERRIDES,
        metavar="KEY=VALUE",
        help="a setting that replaces the configuration's, in every recipe of the run; repeatable",
    )
    group.addoption(
        "--world-size",
        type=int,
        default=None,
        dest=WORLD_SIZE,
        metavar="N",
        help="ranks of a smoke run; without it the smallest number that the configuration allows",
    )
    group.addoption(
        "--config-name",
        default="",
        dest=CONFIG_NAME,
        metavar="NAME",
        help="configs/NAME.yaml of each recipe; `tiny`, or the only one, without it",
    )


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """The recipe whose tests/ folder holds the test, with the options of the run."""
    from evenspan.testing import find_recipe

    option = request.config.getoption
    return _or_fail(
        lambda: find_recipe(Path(request.path), config_name=option(CONFIG_NAME), overrides=option(OVERRIDES))
    )


@pytest.fixture(scope="module")
def recipe_world_size(request: pytest.FixtureRequest, recipe: Recipe) -> int:
    """Ranks of the recipe's configuration: --world-size, or the smallest legal number."""
    from evenspan.testing import legal_world_size

    wanted = request.config.getoption(WORLD_SIZE)
    return _or_fail(lambda: legal_world_size(recipe, wanted=wanted))


@pytest.fixture(scope="module")
def recipe_hooks(recipe: Recipe) -> RecipeHooks:
    """The recipe's own checks, from tests/skills/*/asserts.py."""
    from evenspan.testing import load_hooks

    return _or_fail(lambda: load_hooks(recipe))


@pytest.fixture(scope="module")
def structure(recipe: Recipe, recipe_world_size: int) -> Structure:
    """The recipe's checked configuration and its model on the meta device; starts no process."""
    from evenspan.testing import build_structure

    return _or_fail(lambda: build_structure(recipe, world_size=recipe_world_size))


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """Pools of ranks by world size; one pool lives at a time, all end with the session."""
    from evenspan.testing import RankPool

    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        for size, pool in pools.items():
            if size != world_size:
                pool.close()
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def recipe_ranks(recipe_world_size: int, rank_pools: Callable[[int], RankPool]) -> RankPool:
    """As many ranks as the recipe's configuration runs on; they start with their first function."""
    return rank_pools(recipe_world_size)


@pytest.fixture(scope="module")
def smoke(recipe: Recipe, recipe_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """A few training steps of the recipe on its ranks and in one process."""
    from evenspan.testing import run_smoke

    directory = tmp_path_factory.mktemp(f"smoke-{recipe.name}")
    return _or_fail(lambda: run_smoke(recipe, recipe_ranks, directory=directory))


def _or_fail(make: Callable[[], _Value]) -> _Value:
    """What `make` returns; a named error becomes the test's failure, without a traceback of ours."""
    __tracebackhide__ = True
    try:
        return make()
    except EvenspanError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)
