"""Tests on ranks: pools of processes, recipes, smoke runs against one process, assertions.

`evenspan.pytest_plugin` makes fixtures of these. Nothing here loads torch when it is imported.
"""

from evenspan.ranks import GROUP_TIMEOUT, RankContext, RankFailure, RankPool, make_deterministic
from evenspan.testing.asserts import (
    assert_close,
    assert_equal_on_ranks,
    assert_finite,
    assert_local_length,
    assert_same_samples,
)
from evenspan.testing.hooks import RecipeHooks, load_hooks
from evenspan.testing.recipe import Recipe, find_recipe, legal_world_size
from evenspan.testing.smoke import RankRun, Smoke, run_smoke, smoke_overrides
from evenspan.testing.structure import Structure, build_structure

__all__ = [
    "GROUP_TIMEOUT",
    "RankContext",
    "RankFailure",
    "RankPool",
    "RankRun",
    "Recipe",
    "RecipeHooks",
    "Smoke",
    "Structure",
    "assert_close",
    "assert_equal_on_ranks",
    "assert_finite",
    "assert_local_length",
    "assert_same_samples",
    "build_structure",
    "find_recipe",
    "legal_world_size",
    "load_hooks",
    "make_deterministic",
    "run_smoke",
    "smoke_overrides",
]
