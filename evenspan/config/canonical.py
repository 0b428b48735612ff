"""Brings what a user wrote under the schema's own names, and finds contradictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenspan.config.spellings import FREE_DICTS, MESH_SEQUENCE, Spellings, spellings_of
from evenspan.config.tasks import SCHEMAS
from evenspan.errors import Finding, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One setting as the user wrote it."""

    path: str
    spelled: str
    value: Any
    source: str


def entries(
    tree: Mapping[str, Any], source: str, findings: list[Finding], *, names: Spellings, prefix: str = ""
) -> Iterator[Entry]:
    """Every setting of `tree` under its canonical path in `names`; what has none goes to `findings`."""
    for key, value in tree.items():
        written = f"{prefix}{key}"
        path = _without_alias(written)
        if path == MESH_SEQUENCE:
            findings.append(_mesh_sequence(written, value))
        elif path.rpartition(".")[0] in FREE_DICTS:
            yield Entry(path=path, spelled=written, value=value, source=source)
        elif path in names.known_spellings and not (
            isinstance(value, Mapping) and path in names.known_sections
        ):
            yield from _canonical(path, written, value, source, findings, names=names)
        elif (refused := names.refusal(path)) is not None:
            whose, hint = refused
            fact = f"{whose}'s setting has no counterpart here"
            findings.append(Finding(code="C008", at=written, fact=fact, hint=hint))
        elif path in names.known_sections or "." in str(key):
            yield from _section(written, value, source, findings, names=names)
        else:
            findings.append(_unknown(written, names))


def _without_alias(path: str) -> str:
    head = "model.kwargs."
    return f"model_kwargs.{path.removeprefix(head)}" if path.startswith(head) else path


def _section(
    written: str, value: Any, source: str, findings: list[Finding], *, names: Spellings
) -> Iterator[Entry]:
    if isinstance(value, Mapping):
        yield from entries(value, source, findings, names=names, prefix=f"{written}.")
    elif _without_alias(written) not in names.known_sections:
        findings.append(_unknown(written, names))
    elif value is not None:
        findings.append(
            Finding(
                code="C002",
                at=written,
                fact=f"{value!r} stands where a group of settings belongs",
                hint=f"write {_listed(_children(_without_alias(written), names))} below it",
            )
        )


def _canonical(
    path: str, written: str, value: Any, source: str, findings: list[Finding], *, names: Spellings
) -> Iterator[Entry]:
    table = names.translations.get(path)
    if table is not None:
        key = next((known for known in table if _same(known, value)), _NO_VALUE)
        if key is _NO_VALUE:
            legal = " or ".join(str(known) for known in table)
            findings.append(
                Finding(
                    code="C008", at=written, fact=f"{value!r} is not supported", hint=f"supported: {legal}"
                )
            )
            return
        for canonical, translated in table[key].items():
            yield Entry(path=canonical, spelled=written, value=translated, source=source)
        return
    canonical = names.renames.get(path, path)
    if path == "parallel.mesh.context" and value is None:
        return
    yield Entry(path=canonical, spelled=written, value=value, source=source)


_NO_VALUE = object()


def _same(known: Any, value: Any) -> bool:
    """Equal, and not a number standing for a truth value."""
    return known == value and isinstance(known, bool) == isinstance(value, bool)


def _mesh_sequence(written: str, value: Any) -> Finding:
    return Finding(
        code="T104",
        at=written,
        fact=f"there is no mesh axis `sequence` (got {value!r}); two kinds of sequence parallelism exist",
        hint=(
            f"tokens split over ranks, heads exchanged inside attention: sequence_parallel_size: {value} "
            f"(the same as parallel.mesh.context: {value}); activations split beside tensor parallelism: "
            f"parallel.mesh.tensor: {value} with parallel.backend_kwargs.sequence_parallel: true"
        ),
    )


def _unknown(written: str, names: Spellings) -> Finding:
    other = _task_that_knows(_without_alias(written))
    if other is not None:
        hint = f"delete it, or write task: {other}"
        return Finding(code="C001", at=written, fact=f"is a setting of task: {other} only", hint=hint)
    parent, _, name = _without_alias(written).rpartition(".")
    near = nearest(name, _children(parent, names))
    near = [f"{parent}.{child}" if parent else child for child in near]
    elsewhere = sorted(path for path in names.known_spellings if path.rpartition(".")[2] == name)
    hint = f"did you mean {_listed(elsewhere + near)}?" if elsewhere or near else "delete it"
    return Finding(code="C001", at=written, fact="unknown key", hint=hint)


def _task_that_knows(path: str) -> str | None:
    """The first task that has a setting or group `path`."""
    for task, schema in SCHEMAS.items():
        names = spellings_of(schema)
        if path in names.known_spellings or any(
            known.startswith(f"{path}.") for known in names.canonical_paths
        ):
            return task
    return None


def _children(parent: str, names: Spellings) -> list[str]:
    """Names that may stand directly below `parent`."""
    prefix = f"{parent}." if parent else ""
    found = {
        path.removeprefix(prefix).split(".")[0] for path in names.known_spellings if path.startswith(prefix)
    }
    return sorted(found)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(names))


def without_conflicts(entries: Sequence[Entry], findings: list[Finding]) -> dict[str, Entry]:
    """One entry per canonical path; a second one must agree with the first."""
    settled: dict[str, Entry] = {}
    for entry in entries:
        first = settled.setdefault(entry.path, entry)
        if first is not entry and first.value != entry.value:
            findings.append(
                Finding(
                    code="C004",
                    at=entry.spelled,
                    fact=f"{entry.value!r} contradicts {first.spelled}={first.value!r} in {entry.source}; "
                    f"both are {entry.path}",
                    hint=f"keep one of them, best spelled {entry.path}",
                )
            )
    return settled
