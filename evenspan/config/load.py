"""Reads a configuration file and overrides into a RunConfig, and reports every mistake at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from evenspan.config import spellings
from evenspan.config.literal import literal_assignments
from evenspan.config.schema import RunConfig
from evenspan.errors import ConfigError, Finding, nearest

PLACEHOLDERS: dict[str, Any] = {"image_or_video_shape": [1, 1, 1, 2, 2], "data.data_path": "."}
"""Stand in for required settings that are missing or unreadable, so that the rest can still be checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A configuration as far as it could be read."""

    config: RunConfig | None
    """None when the file itself could not be read."""
    findings: tuple[Finding, ...] = ()
    broken: frozenset[str] = frozenset()
    """Canonical paths whose value in `config` is a stand-in, because what was written is no legal value."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Canonical path -> the path the user wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    path: str
    spelled: str
    value: Any
    source: str


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """The run described by the file at `path`, changed by `overrides` such as `training.lr=1e-4`.

    Raises ConfigError with every unknown key, wrong value and conflict. Rules between settings are `evenspan.check`'s.
    """
    reading = read_config(path, overrides=overrides)
    if reading.findings:
        raise ConfigError(reading.findings)
    assert reading.config is not None, "a reading without findings has a config"
    return reading.config


def as_yaml(config: RunConfig) -> str:
    """`config` as YAML that `load_config` reads back to an equal value."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def read_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Reading:
    """As much as can be read of the file and the overrides, with all findings; never raises for a user's mistake."""
    findings: list[Finding] = []
    changed = _read_overrides(overrides, findings)
    try:
        written = _read_file(Path(path))
    except ConfigError as error:
        return Reading(config=None, findings=(*error.findings, *findings))
    settled: dict[str, _Entry] = {}
    for layer, source in ((written, str(path)), (changed, "the command line")):
        entries = list(_entries(layer, source, findings))
        settled.update(_without_conflicts(entries, findings))
    values = {path: entry.value for path, entry in settled.items()}
    spelled = {path: entry.spelled for path, entry in settled.items()}
    config, broken = _validated(values, spelled, findings)
    return Reading(config=config, findings=tuple(findings), broken=broken, spelled=spelled)


# ---- files and overrides ----


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise _one(
            "C005",
            str(path),
            f"cannot read the configuration: {reason}",
            "give the path of a .yaml or .py file",
        ) from None
    if path.suffix == ".py":
        return literal_assignments(text, name=str(path))
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=True) if text.strip() else {}
    except (YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise _one(
            "C005", str(path), f"is not readable as YAML: {reason}", "correct the file at that place"
        ) from None
    if not isinstance(loaded, dict):
        raise _one(
            "C005", str(path), f"holds a {type(loaded).__name__}", "write `key: value` lines at the top level"
        )
    return {str(key): value for key, value in loaded.items()}


def _read_overrides(overrides: Sequence[str], findings: list[Finding]) -> dict[str, Any]:
    """Dotted path -> value, the last one of the same path."""
    found: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            hint = "write for example training.lr=1e-4"
            findings.append(Finding(code="C007", at=text, fact="is not of the form key=value", hint=hint))
            continue
        try:
            container = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=True)
        except (YAMLError, OmegaConfBaseException) as error:
            fact = f"the value is not readable as YAML: {' '.join(str(error).split())}"
            findings.append(Finding(code="C007", at=text, fact=fact, hint="correct it, or quote it as text"))
            continue
        assert isinstance(container, dict), "a dotlist makes a mapping"
        found[key.strip()] = container["value"]
    return found


def _one(code: str, at: str, fact: str, hint: str) -> ConfigError:
    return ConfigError([Finding(code=code, at=at, fact=fact, hint=hint)])


# ---- spellings ----


def _entries(
    tree: Mapping[str, Any], source: str, findings: list[Finding], prefix: str = ""
) -> Iterator[_Entry]:
    """Every setting of `tree` under its canonical path; what has none goes to `findings`."""
    for key, value in tree.items():
        written = f"{prefix}{key}"
        path = _without_alias(written)
        if path == spellings.MESH_SEQUENCE:
            findings.append(_mesh_sequence(written, value))
        elif path.rpartition(".")[0] in spellings.FREE_DICTS:
            yield _Entry(path=path, spelled=written, value=value, source=source)
        elif path in spellings.known_spellings() and not isinstance(value, Mapping):
            yield from _canonical(path, written, value, source, findings)
        elif (hint := spellings.refusal(path)) is not None:
            findings.append(
                Finding(code="C008", at=written, fact="LongLive's setting has no counterpart here", hint=hint)
            )
        elif path in spellings.known_sections() or "." in str(key):
            yield from _section(written, value, source, findings)
        else:
            findings.append(_unknown(written))


def _without_alias(path: str) -> str:
    head = "model.kwargs."
    return f"model_kwargs.{path.removeprefix(head)}" if path.startswith(head) else path


def _section(written: str, value: Any, source: str, findings: list[Finding]) -> Iterator[_Entry]:
    if isinstance(value, Mapping):
        yield from _entries(value, source, findings, prefix=f"{written}.")
    elif _without_alias(written) not in spellings.known_sections():
        findings.append(_unknown(written))
    elif value is not None:
        findings.append(
            Finding(
                code="C002",
                at=written,
                fact=f"{value!r} stands where a group of settings belongs",
                hint=f"write {_listed(_children(_without_alias(written)))} below it",
            )
        )


def _canonical(path: str, written: str, value: Any, source: str, findings: list[Finding]) -> Iterator[_Entry]:
    table = spellings.translations().get(path)
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
            yield _Entry(path=canonical, spelled=written, value=translated, source=source)
        return
    canonical = (
        path if path in spellings.canonical_paths() - {"parallel.mesh.context"} else spellings.renames()[path]
    )
    if path == "parallel.mesh.context" and value is None:
        return
    yield _Entry(path=canonical, spelled=written, value=value, source=source)


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
            f"tokens split over ranks, heads exchanged inside attention: sequence_parallel_size: {value} (the same as "
            f"parallel.mesh.context: {value}); activations split beside tensor parallelism: parallel.mesh.tensor: "
            f"{value} with parallel.backend_kwargs.sequence_parallel: true"
        ),
    )


def _unknown(written: str) -> Finding:
    parent, _, name = _without_alias(written).rpartition(".")
    near = nearest(name, _children(parent))
    near = [f"{parent}.{child}" if parent else child for child in near]
    elsewhere = sorted(path for path in spellings.known_spellings() if path.rpartition(".")[2] == name)
    hint = f"did you mean {_listed(elsewhere + near)}?" if elsewhere or near else "delete it"
    return Finding(code="C001", at=written, fact="unknown key", hint=hint)


def _children(parent: str) -> list[str]:
    """Names that may stand directly below `parent`."""
    prefix = f"{parent}." if parent else ""
    names = {
        path.removeprefix(prefix).split(".")[0]
        for path in spellings.known_spellings()
        if path.startswith(prefix)
    }
    return sorted(names)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(names))


def _without_conflicts(entries: Sequence[_Entry], findings: list[Finding]) -> dict[str, _Entry]:
    """One entry per canonical path; a second one must agree with the first."""
    settled: dict[str, _Entry] = {}
    for entry in entries:
        first = settled.setdefault(entry.path, entry)
        if first.value != entry.value:
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


# ---- validation ----


def _validated(
    values: Mapping[str, Any], spelled: Mapping[str, str], findings: list[Finding]
) -> tuple[RunConfig, frozenset[str]]:
    """The config, with stand-ins for what is not legal, and the canonical paths of those stand-ins."""
    legal = dict(values)
    broken: set[str] = set()
    while True:  # a second round only when stand-ins or defaults were put in
        try:
            return RunConfig.model_validate(_nested({**_stand_ins(broken), **legal})), frozenset(broken)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                path = _leaf(problem["loc"])
                if path in broken:
                    continue
                broken.add(path)
                legal.pop(path, None)
                written = spelled.get(path, path)
                findings.append(_violation(path, written, values, problem["type"], problem["msg"]))


def _stand_ins(broken: set[str]) -> dict[str, Any]:
    return {path: value for path, value in PLACEHOLDERS.items() if path in broken}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"data": {}}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _leaf(location: tuple[int | str, ...]) -> str:
    """The canonical path a validation error is about; indices into lists and union arms are left out."""
    parts = [str(part) for part in location]
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path in spellings.FREE_DICTS and count < len(parts):
            return f"{path}.{parts[count]}"
        if path in spellings.canonical_paths():
            return path
    raise AssertionError(f"validation error at {location}, which is no setting")


RANGE_KINDS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "literal_error",
        "string_too_short",
    }
)


def _violation(path: str, written: str, values: Mapping[str, Any], kind: str, message: str) -> Finding:
    meaning = _description(path)
    if path not in values:
        return Finding(code="C009", at=written, fact="is required and missing", hint=f"write it: {meaning}")
    code = "C003" if kind in RANGE_KINDS else "C002"
    return Finding(
        code=code, at=written, fact=f"{values[path]!r}: {_lowered(message)}", hint=f"{path}: {meaning}"
    )


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _description(path: str) -> str:
    model: Any = RunConfig
    for section in path.split("."):
        info = model.model_fields[section]
        model = info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    if info.is_required() or info.default_factory is not None:
        return info.description
    return f"{info.description} (default {info.default!r})"
