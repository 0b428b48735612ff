"""Guards on imports: layers point downwards, launch-time checks load no torch, models know no ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

from tests.guards.source import PACKAGE, Source, dotted, is_type_checking, last_name, module_name

LEVELS = {
    "errors": 0,
    "ranks": 1,
    "config": 1,
    "topology": 2,
    "attention": 3,
    "comm": 4,
    "data": 4,
    "model": 4,
    "parallel": 5,
    "check": 6,
    "train": 7,
    "planner": 7,
    "report": 7,
    "proof": 8,
    "skill": 9,
    "testing": 9,
    "cli": 10,
    "pytest_plugin": 11,
    "__main__": 11,
}
"""The layers of the package, lowest first; parts of one level do not know each other."""

TORCH_FREE = (
    "evenspan/__init__.py",
    "evenspan/errors.py",
    "evenspan/ranks.py",
    "evenspan/config/*.py",
    "evenspan/check/*.py",
    "evenspan/topology/degrees.py",
    "evenspan/topology/layout.py",
    "evenspan/attention/spans.py",
    "evenspan/attention/patterns.py",
    "evenspan/attention/work.py",
    "evenspan/data/fingerprint.py",
    "evenspan/data/text_corpus.py",
    "evenspan/data/tokenizer.py",
    "evenspan/model/decoder_config.py",
    "evenspan/model/presets.py",
    "evenspan/model/wan_config.py",
    "evenspan/planner/*.py",
    "evenspan/cli/*.py",
    "evenspan/testing/*.py",
    "evenspan/pytest_plugin.py",
)
"""Files whose import must not load torch, so that a configuration error is told within a second."""


def imported(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every module or name the file imports, absolute, wherever the import stands."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node, alias.name) for alias in names)
            case ast.ImportFrom(names=names):
                base = _absolute(source, node)
                yield from ((node, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if last_name(func) in {
                "import_module",
                "__import__",
            }:
                yield node, name
            case _:
                continue


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """The module an import reads from, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    is_package = source.path.endswith("__init__.py")
    parts = module_name(source.path).split(".")
    parts = parts[: len(parts) - node.level + int(is_package)]
    return ".".join([*parts, node.module] if node.module else parts)


def part_of(name: str) -> str:
    """The part of the package a dotted name lies in: `evenspan.model.wan` -> `model`; "" for the root."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def check_layers(source: Source) -> list[str]:
    """An import of the package's own code stays in its part or points to a lower layer."""
    if not source.path.startswith(f"{PACKAGE}/"):
        return []
    own = part_of(module_name(source.path))
    if own and own not in LEVELS:
        return [f"{source.path}:1: part {own!r} has no layer"]
    found = []
    for node, name in imported(source):
        if name.split(".")[0] != PACKAGE:
            continue
        other = part_of(name)
        if other in {own, "", "__version__"}:
            continue
        if other not in LEVELS:
            found.append(source.at(node, f"imports {name}, which has no layer"))
        elif LEVELS[other] >= LEVELS.get(own, LEVELS["errors"] + 1):
            found.append(source.at(node, f"{own or PACKAGE} imports {name}, which is not below it"))
    return found


def check_model_is_single_device(source: Source) -> list[str]:
    """No file of `model/` names torch.distributed."""
    if not source.path.startswith(f"{PACKAGE}/model/"):
        return []
    found = [
        source.at(node, f"model/ imports {name}")
        for node, name in imported(source)
        if f"{name}.".startswith("torch.distributed.")
    ]
    found += [
        source.at(node, "model/ names torch.distributed")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed"
    ]
    return found


def check_torch_free(source: Source) -> list[str]:
    """The files of TORCH_FREE import torch inside functions only, if at all."""
    if not any(fnmatch(source.path, pattern) for pattern in TORCH_FREE):
        return []
    return [
        source.at(node, f"imports {name} when it is imported")
        for node, name in _executed_on_import(source)
        if name.split(".")[0] == "torch"
    ]


def _executed_on_import(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """The imports that run when the file itself is imported."""
    waiting: list[ast.AST] = list(source.tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            part = Source(source.path, "", ast.Module([node], []))
            yield from imported(part)
        if is_type_checking(node):
            waiting.extend(node.orelse)  # type: ignore[attr-defined]
        else:
            waiting.extend(ast.iter_child_nodes(node))
