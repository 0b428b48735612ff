"""Recipes as tests see them: folders with configs/, model/, data/ and tests/, and a legal world size.

Nothing here loads torch or starts a process, so a wrong override is told in a second.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from evenspan.check.rules import CheckResult, check_file
from evenspan.errors import ConfigError, Finding, nearest

if TYPE_CHECKING:
    from evenspan.config.tasks import AnyRunConfig

DEFAULT_CONFIG = "tiny"
MOST_MULTIPLES = 16
"""How many multiples of the fixed degrees are tried for an axis that is -1."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe with the configuration that this test run asks for."""

    root: Path
    config_name: str = ""
    """Stem of the file in configs/; empty takes `tiny`, or the only one there is."""
    overrides: tuple[str, ...] = ()
    """`key=value` settings of the test run; they win over the file."""
    _modules: dict[str, ModuleType] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.root.name

    @property
    def config_path(self) -> Path:
        """The configuration file. Raises ConfigError C031 naming those there are."""
        names = sorted(path.stem for path in (self.root / "configs").glob("*.yaml"))
        wanted = self.config_name or (names[0] if len(names) == 1 else DEFAULT_CONFIG)
        if wanted in names:
            return self.root / "configs" / f"{wanted}.yaml"
        near = nearest(wanted, names) or names
        hint = (
            f"write --config-name {near[0]}; there are {', '.join(names)}"
            if names
            else "add configs/tiny.yaml"
        )
        raise _one("C031", f"{self.root}/configs", f"there is no {wanted}.yaml", hint)

    def config(self, *, extra: Sequence[str] = (), world_size: int | None = None) -> AnyRunConfig:
        """The checked configuration. `extra` settings stand between the file and the run's own overrides.

        Raises ConfigError with every finding. Files the configuration names are not looked at.
        """
        return self.check(extra=extra, world_size=world_size).legal_config()

    def check(self, *, extra: Sequence[str] = (), world_size: int | None = None) -> CheckResult:
        """What the checker says of the configuration, without looking at the files it names."""
        overrides = [*extra, *self.overrides]
        return check_file(self.config_path, overrides=overrides, world_size=world_size, check_paths=False)

    def module(self, part: str) -> ModuleType:
        """The Python package `part` of the recipe, such as `model` or `data`. Raises ConfigError C032."""
        if part not in self._modules:
            file = self.root / part / "__init__.py"
            if not file.is_file():
                hint = f"write {part}/__init__.py; docs/concepts/testing.md says what it holds"
                raise _one("C032", str(file), "the recipe's tests need this file, and it is not there", hint)
            self._modules[part] = module_at(file, name=f"evenspan_recipe_{self.name}_{part}")
        return self._modules[part]


def find_recipe(path: Path, *, config_name: str = "", overrides: Sequence[str] = ()) -> Recipe:
    """The recipe whose tests/ folder holds the file `path`. Raises ConfigError C030 when there is none."""
    for folder in path.resolve().parents:
        if folder.name == "tests" and (folder.parent / "configs").is_dir():
            return Recipe(root=folder.parent, config_name=config_name, overrides=tuple(overrides))
    hint = "put the test below <recipe>/tests/, beside <recipe>/configs/"
    raise _one("C030", str(path), "this test belongs to no recipe, but asks for one", hint)


def legal_world_size(recipe: Recipe, *, wanted: int | None = None) -> int:
    """How many ranks the recipe's configuration runs on: `wanted`, or the smallest legal number.

    Without a degree of -1 only their product is legal; with one, the smallest multiple that breaks no rule.
    Raises ConfigError: T108 for a `wanted` that cannot be, naming the smallest that can; else the findings.
    """
    reading = recipe.check()
    config = reading.legal_config()
    mesh = config.parallel.mesh
    degrees = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    fixed = config.sequence_parallel_size * prod(degree for degree in degrees.values() if degree != -1)
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if wanted is not None and not _findings(recipe, free, fixed, wanted):
        return wanted
    sizes = [fixed * multiple for multiple in range(1, MOST_MULTIPLES + 1)] if free else [fixed]
    smallest = next((size for size in sizes if not _findings(recipe, free, fixed, size)), None)
    if smallest is None:
        raise ConfigError(_findings(recipe, free, fixed, sizes[0]))
    if wanted is None:
        return smallest
    product = " x ".join(
        f"{axis} {degree}" for axis, degree in {**degrees, "context": config.sequence_parallel_size}.items()
    )
    fact = f"{wanted} ranks cannot run {recipe.name}/{recipe.config_path.name}: its degrees are {product}"
    hint = f"the smallest legal number is {smallest}: write --world-size {smallest}, or leave it out"
    raise _one("T108", f"--world-size {wanted}", fact, hint)


def _findings(recipe: Recipe, free: Sequence[str], fixed: int, size: int) -> tuple[Finding, ...]:
    """What is wrong with `size` ranks; the free axis is written out, so that rules about it are asked."""
    solved = [f"parallel.mesh.{axis}={size // fixed}" for axis in free] if size % fixed == 0 else []
    written = Recipe(root=recipe.root, config_name=recipe.config_name, overrides=(*recipe.overrides, *solved))
    return written.check(world_size=size).findings


def module_at(file: Path, *, name: str) -> ModuleType:
    """The module that `file` holds, imported under `name` without touching the import path."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} is a Python file"
    assert spec.loader is not None, f"{file} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    return module


def _one(code: str, at: str, fact: str, hint: str) -> ConfigError:
    return ConfigError([Finding(code=code, at=at, fact=fact, hint=hint)])
