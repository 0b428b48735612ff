"""Validates settings against the schema without stopping at the first mistake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from evenspan.config.spellings import FREE_DICTS, Spellings, spellings_of
from evenspan.config.tasks import AnyRunConfig, Schema
from evenspan.errors import Finding

PLACEHOLDERS: dict[str, Any] = {
    "image_or_video_shape": [1, 1, 1, 2, 2],
    "data.data_path": ".",
    "data.sequence_length": 1,
}
"""Stand in for required settings that are missing or unreadable, so that the rest can still be checked."""


def validated(
    schema: Schema, values: Mapping[str, Any], spelled: Mapping[str, str], findings: list[Finding]
) -> tuple[AnyRunConfig, frozenset[str]]:
    """The config, with stand-ins for what is not legal, and the canonical paths of those stand-ins."""
    legal = dict(values)
    broken: set[str] = set()
    problems = _problems(schema, legal)
    while problems:  # again, because a stand-in or a default takes the place of every broken value
        for path, (kind, message) in problems.items():
            findings.append(_violation(schema, path, spelled.get(path, path), values, kind, message))
            legal.pop(path, None)
        broken |= problems.keys()
        legal |= {path: value for path, value in PLACEHOLDERS.items() if path in broken}
        problems = _problems(schema, legal)
    return schema.model_validate(_nested(legal)), frozenset(broken)


def _problems(schema: Schema, values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Canonical path -> (pydantic's name of the problem, its message), the first of each path."""
    try:
        schema.model_validate(_nested(values))
    except ValidationError as error:
        names = spellings_of(schema)
        found = [
            (_leaf(item["loc"], names), item["type"], item["msg"]) for item in error.errors(include_url=False)
        ]
        return {path: (kind, message) for path, kind, message in reversed(found)}
    return {}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"data": {}}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _leaf(location: tuple[int | str, ...], names: Spellings) -> str:
    """The canonical path a validation error is about; indices into lists and union arms are left out."""
    parts = [str(part) for part in location]
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path in FREE_DICTS and count < len(parts):
            return f"{path}.{parts[count]}"
        if path in names.canonical_paths:
            return path
    raise AssertionError(f"validation error at {location}, which is no setting")


RANGE_KINDS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "finite_number",
        "literal_error",
        "string_too_short",
    }
)


def _violation(  # noqa: PLR0917
    schema: Schema, path: str, written: str, values: Mapping[str, Any], kind: str, message: str
) -> Finding:
    meaning = _description(schema, path)
    if path not in values:
        return Finding(code="C009", at=written, fact="is required and missing", hint=f"write it: {meaning}")
    fact = f"{values[path]!r}: {_lowered(message)}"
    hint = f"{path}: {meaning}"
    if kind in RANGE_KINDS:
        return Finding(code="C003", at=written, fact=fact, hint=hint)
    return Finding(code="C002", at=written, fact=fact, hint=hint)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _description(schema: Schema, path: str) -> str:
    model: Any = schema
    for section in path.split("."):
        info = model.model_fields[section]
        model = info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    if info.is_required() or info.default_factory is not None:
        return info.description
    return f"{info.description} (default {info.default!r})"
