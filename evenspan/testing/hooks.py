"""A recipe's own checks: functions in tests/skills/<name>/asserts.py that the shipped tests call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from evenspan.errors import ConfigError, Finding, nearest
from evenspan.testing.recipe import Recipe, module_at

if TYPE_CHECKING:
    from evenspan.testing.smoke import Smoke
    from evenspan.testing.structure import Structure

HOOKS = ("check_structure", "check_smoke")
PREFIX = "check_"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeHooks:
    """What a recipe adds to the shipped tests; each function raises AssertionError for what it refuses."""

    files: tuple[Path, ...]
    found: dict[str, tuple[Callable[..., None], ...]]

    def check_structure(self, structure: Structure) -> None:
        """Call every `check_structure(structure)` of the recipe."""
        for function in self.found["check_structure"]:
            function(structure)

    def check_smoke(self, smoke: Smoke) -> None:
        """Call every `check_smoke(smoke)` of the recipe."""
        for function in self.found["check_smoke"]:
            function(smoke)


def load_hooks(recipe: Recipe) -> RecipeHooks:
    """The hooks in `tests/skills/*/asserts.py` of the recipe, in the order of their folders' names.

    Raises ConfigError C033 for a function `check_...` that nothing would call.
    """
    files = tuple(sorted((recipe.root / "tests" / "skills").glob("*/asserts.py")))
    found: dict[str, list[Callable[..., None]]] = {hook: [] for hook in HOOKS}
    for file in files:
        name = f"evenspan_recipe_{recipe.name}_{file.parent.name.replace('-', '_')}_asserts"
        module = module_at(file, name=name)
        for label, value in vars(module).items():
            own = isinstance(value, FunctionType) and value.__module__ == name
            if not own or not label.startswith(PREFIX):
                continue
            if label not in HOOKS:
                hint = f"call it {' or '.join(nearest(label, HOOKS))}, or _{label} if it is a helper"
                raise ConfigError(
                    [Finding(code="C033", at=str(file), fact=f"nothing calls {label}", hint=hint)]
                )
            found[label].append(value)
    return RecipeHooks(files=files, found={hook: tuple(functions) for hook, functions in found.items()})
