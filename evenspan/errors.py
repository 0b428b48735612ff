"""The errors a user can meet. Each says a code, the fact with its values, and a way out.

Codes are one letter and three digits; `evenspan explain CODE` prints the page of each. The letter says
where to look: C configuration file, T topology, S sequence shape, M model, A attention, D data, K checkpoint,
R run, X communication, P plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One violated rule: where it is written, what holds, and what would be legal."""

    code: str
    at: str
    """Dotted configuration key, path or module the finding is about."""
    fact: str
    """What is wrong, with the values."""
    hint: str
    """The nearest legal values, or what to do."""

    def __str__(self) -> str:
        return f"{self.code} {_printable(self.at)}: {self.fact}\n     -> {self.hint}"


def _printable(text: str) -> str:
    """`text` without characters that would steer a terminal; a key may hold any."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Teller(Enum):
    """Who prints an error: ranks that raise the same one print it once."""

    THIS_PROCESS = auto()
    THIS_RANK = auto()
    """For the other ranks as well."""
    OTHER_RANK = auto()


class EvenspanError(Exception):
    """A user's mistake or a failure of the outside world, never a bug of ours (those are assertions)."""

    exit_code: int = 1
    told_by: Teller = Teller.THIS_PROCESS

    def __init__(self, code: str, fact: str, *, hint: str) -> None:
        super().__init__(f"{code} {fact}\n     -> {hint}")
        self.code = code
        self.fact = fact
        self.hint = hint


class ConfigError(EvenspanError):
    """Every configuration mistake of one run, found before any process group exists."""

    exit_code: int = 2

    def __init__(self, findings: Sequence[Finding]) -> None:
        assert findings, "a ConfigError holds at least one finding"
        count = len(findings)
        fact = f"{count} configuration {'error' if count == 1 else 'errors'}"
        super().__init__(findings[0].code, fact, hint=findings[0].hint)
        self.findings = tuple(findings)

    def __str__(self) -> str:
        return "\n".join([f"{self.fact}:", *(str(finding) for finding in self.findings)])


class TopologyError(EvenspanError):
    """Ranks, degrees or groups that do not fit together (T codes)."""

    exit_code: int = 2


class ShapeError(EvenspanError):
    """A tensor whose shape breaks a contract (S codes)."""


class ModelError(EvenspanError):
    """An unknown model, or weights that do not fit it (M codes)."""


class AttentionError(EvenspanError):
    """A span table or kernel that cannot serve the request (A codes)."""


class DataError(EvenspanError):
    """Missing, corrupt or inconsistent data (D codes)."""


class CheckpointError(EvenspanError):
    """A checkpoint that cannot be written or read (K codes)."""


class RunError(EvenspanError):
    """A run that cannot start or go on: occupied directory, non-finite loss (R codes)."""


class CommError(EvenspanError):
    """Ranks that disagree, or a collective that would be wrong (X codes)."""


class PlanError(EvenspanError):
    """A tensor plan that does not fit its model, or a tensor that does not fit its plan (P codes)."""

    exit_code: int = 2


def nearest(name: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """The choices most like `name`, best first; all of them when none is alike and they are few."""
    options = sorted(set(choices))
    close = difflib.get_close_matches(name, options, n=count, cutoff=0.5)
    return close or (options if len(options) <= 8 else [])
