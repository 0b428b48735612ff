"""Reads a configuration file and overrides into a run's configuration, and reports every mistake at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from evenspan.config.canonical import Entry, entries, without_conflicts
from evenspan.config.literal import literal_assignments
from evenspan.config.spellings import spellings_of
from evenspan.config.tasks import DEFAULT_TASK, SCHEMAS, AnyRunConfig, Schema
from evenspan.config.validate import validated
from evenspan.errors import ConfigError, Finding, nearest

UNREADABLE_YAML = (YAMLError, OmegaConfBaseException, ValueError, RecursionError)
"""What reading YAML raises; ValueError comes from a number with more digits than Python converts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A configuration as far as it could be read."""

    config: AnyRunConfig | None
    """None when the file itself could not be read."""
    findings: tuple[Finding, ...] = ()
    broken: frozenset[str] = frozenset()
    """Canonical paths whose value in `config` is a stand-in, because what was written is no legal value."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Canonical path -> the path the user wrote."""


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> AnyRunConfig:
    """The run described by the file at `path`, changed by `overrides` such as `training.lr=1e-4`.

    Raises ConfigError with every unknown key, wrong value and conflict; rules between settings are in
    `evenspan.check`.
    """
    reading = read_config(path, overrides=overrides)
    if reading.findings:
        raise ConfigError(reading.findings)
    assert reading.config is not None, "a reading without findings has a config"
    return reading.config


def as_yaml(config: AnyRunConfig) -> str:
    """`config` as YAML that `load_config` reads back to an equal value."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def read_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Reading:
    """As much as can be read of the file and the overrides, with all findings; a mistake does not raise."""
    findings: list[Finding] = []
    changed = _read_overrides(overrides, findings)
    try:
        written = _read_file(Path(path))
    except ConfigError as error:
        return Reading(config=None, findings=(*error.findings, *findings))
    schema = _schema({**written, **changed}, findings)
    written.pop("task", None)
    changed.pop("task", None)
    settled: dict[str, Entry] = {}
    for layer, source in ((written, str(path)), (changed, "the command line")):
        found = list(entries(layer, source, findings, names=spellings_of(schema)))
        settled.update(without_conflicts(found, findings))
    values = {path: entry.value for path, entry in settled.items()}
    spelled = {path: entry.spelled for path, entry in settled.items()}
    values["task"] = next(task for task, known in SCHEMAS.items() if known is schema)
    config, broken = validated(schema, values, spelled, findings)
    return Reading(config=config, findings=tuple(findings), broken=broken, spelled=spelled)


def _schema(written: Mapping[str, Any], findings: list[Finding]) -> Schema:
    """The schema of the task that is asked for; the default one where it is none."""
    task = written.get("task", DEFAULT_TASK)
    if isinstance(task, str) and task in SCHEMAS:
        return SCHEMAS[task]
    near = nearest(str(task), SCHEMAS)
    findings.append(
        Finding(code="C003", at="task", fact=f"{task!r} is no task", hint=f"write {' or '.join(near)}")
    )
    return SCHEMAS[DEFAULT_TASK]


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
    except AssertionError:  # what OmegaConf has to say about a document that is one number
        loaded = text.strip()
    except UNREADABLE_YAML as error:
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
        except UNREADABLE_YAML as error:
            fact = f"the value is not readable as YAML: {' '.join(str(error).split())}"
            findings.append(Finding(code="C007", at=text, fact=fact, hint="correct it, or quote it as text"))
            continue
        assert isinstance(container, dict), "a dotlist makes a mapping"
        found[key.strip()] = container["value"]
    return found


def _one(code: str, at: str, fact: str, hint: str) -> ConfigError:
    return ConfigError([Finding(code=code, at=at, fact=fact, hint=hint)])
