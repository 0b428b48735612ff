"""The recipe without a process: its configuration checks clean, its model builds, its plan fits."""

from __future__ import annotations

from evenspan.testing import Recipe, RecipeHooks, Structure


def test_configuration_checks_clean(recipe: Recipe, recipe_world_size: int) -> None:
    assert recipe.check(world_size=recipe_world_size).findings == ()


def test_model_builds_without_memory(structure: Structure) -> None:
    parameters = dict(structure.model.named_parameters())
    assert parameters
    assert {parameter.device.type for parameter in parameters.values()} == {"meta"}


def test_recipe_checks(structure: Structure, recipe_hooks: RecipeHooks) -> None:
    recipe_hooks.check_structure(structure)
