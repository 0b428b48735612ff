"""Names that a file imports from this repository exist: collecting tests runs no import inside a function."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import types
from collections.abc import Iterator

from tests.guards.source import Source

OWN = ("evenspan", "tests", "benchmarks", "recipes")


def check_imported_names(source: Source) -> list[str]:
    """`from module import name`, wherever it stands in the file, finds both."""
    return [
        source.at(node, f"{module} has no {name}")
        for node, module, name in _imported(source.tree)
        if not _exists(module, name)
    ]


def _imported(tree: ast.Module) -> Iterator[tuple[ast.ImportFrom, str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.split(".")[0] in OWN:
            yield from ((node, node.module, alias.name) for alias in node.names)


def _exists(module: str, name: str) -> bool:
    if not _found(module):
        return False
    loaded = importlib.import_module(module)
    return name in dir(loaded) or (_is_package(loaded) and _found(f"{module}.{name}"))


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _is_package(module: types.ModuleType) -> bool:
    return "__path__" in vars(module)
