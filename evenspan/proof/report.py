"""What a proof found, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

LIMITS = {"loss": 1e-12, "gradient": 1e-10, "norm": 1e-10, "weights": 1e-8, "tokens": 1e-10}
"""Largest relative error in fp64. Weights: AdamW divides by the root of a square, which costs digits."""


class Status(StrEnum):
    """What became of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was compared."""

    name: str
    status: Status
    text: str
    """What was seen, with numbers; for `not run`, what would let it run."""
    error: float | None = None
    """Largest relative error over all ranks."""
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterResult:
    """One parameter's gradient on all ranks."""

    name: str
    passed: bool
    error: float
    """Largest relative error over the ranks after one backward."""
    error_two_backwards: float
    relation: str = "equal"
    text: str = ""
    """What is wrong, in words."""
    cause: str = ""
    """The likely cause: module, rule of the plan, what to change."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a proof."""

    subject: str
    layout: str
    degrees: dict[str, int]
    checks: tuple[Check, ...]
    parameters: tuple[ParameterResult, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by part: start of the ranks, one process, ranks."""

    @property
    def passed(self) -> bool:
        """Whether nothing that was run failed."""
        failed = any(check.status is Status.FAILED for check in self.checks)
        return not failed and all(parameter.passed for parameter in self.parameters)

    @property
    def worst(self) -> ParameterResult | None:
        """The parameter with the largest error: a wrong one if there is any."""
        return max(
            self.parameters,
            key=lambda parameter: (not parameter.passed, parameter.error, parameter.error_two_backwards),
            default=None,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values: `passed`, `worst`, `parameters`, `checks` and what was asked for."""
        return {
            "passed": self.passed,
            "subject": self.subject,
            "layout": self.layout,
            "degrees": self.degrees,
            "worst": None if self.worst is None else asdict(self.worst),
            "checks": [asdict(check) for check in self.checks],
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "seconds": self.seconds,
        }

    def as_text(self) -> str:
        """A table of the checks, the wrong parameters with their causes, and the verdict."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [f"{self.subject} at {self.layout}, against one process", ""]
        lines += [f"{check.status.value:<8} {check.name:<{width}}  {check.text}" for check in self.checks]
        wrong = [parameter for parameter in self.parameters if not parameter.passed]
        if wrong:
            lines += ["", f"{len(wrong)} of {len(self.parameters)} gradients are wrong:"]
        for parameter in wrong:
            lines.append(f"  {parameter.name} {parameter.text}")
            if parameter.cause:
                lines.append(f"    -> {parameter.cause}")
        took = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        verdict = "equal to one process" if self.passed else "NOT equal to one process"
        return "\n".join([*lines, "", f"{verdict} ({took})"])
