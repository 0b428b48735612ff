"""A Python file as the guards read it: its path from the repository root, its text and its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "evenspan"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One file; `path` is relative to the repository root, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST, message: str) -> str:
        """A violation as one line: path, line, what is wrong."""
        return f"{self.path}:{node.lineno}: {message}"  # type: ignore[attr-defined]


def snippet(text: str, *, path: str = "evenspan/model/example.py") -> Source:
    """The source of a test's own example, placed at `path`."""
    return Source(path, text, ast.parse(text))


def package_sources() -> list[Source]:
    """Every Python file of the package and the entry point beside it."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    if (ROOT / "train.py").exists():
        files.append(ROOT / "train.py")
    return [snippet(file.read_text(), path=file.relative_to(ROOT).as_posix()) for file in files]


def module_name(path: str) -> str:
    """`evenspan/a/b.py` -> `evenspan.a.b`; a package's `__init__.py` -> the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    """Every function of the tree, nested ones and methods included."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last part of the name that is called: `a.b.f(x)` gives `f`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield last_name(node.func), node


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name, or "" for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def dotted(node: ast.AST) -> str:
    """`a.b.c` as written, or "" when the node is not a plain dotted name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{head}.{attr}" if (head := dotted(value)) else ""
        case _:
            return ""


def is_type_checking(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def tree_sources() -> list[Source]:
    """Every Python file of the package, its tests, benchmarks and recipes."""
    folders = (PACKAGE, "tests", "benchmarks", "recipes")
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [snippet(file.read_text(), path=file.relative_to(ROOT).as_posix()) for file in files]
