"""What a rule is: a small pure function with a code, a name, a reason and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from evenspan.config.schema import RunConfig
from evenspan.errors import Finding, ModelError
from evenspan.topology.degrees import divisors

if TYPE_CHECKING:
    from evenspan.model.wan_config import WanConfig


@dataclass(frozen=True)
class Run:
    """What a rule looks at: the configuration, and how many ranks will run it."""

    config: RunConfig
    world_size: int | None
    """None when nobody said how many ranks there will be: rules about the world then stay silent."""
    check_paths: bool = True
    """Whether rules may look at this machine: its files and devices."""

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        return self.config.sequence_parallel_size

    @cached_property
    def model(self) -> WanConfig | None:
        """The preset with its overrides; None when it is unknown or the overrides do not fit."""
        from evenspan.model.presets import model_preset

        wanted = self.config.model_kwargs
        try:
            return model_preset(wanted.model_name).with_overrides(wanted.overrides)
        except (ModelError, TypeError):  # M101 to M103 say which
            return None

    @property
    def legal_contexts(self) -> list[int]:
        """Values of sequence_parallel_size that divide the world and the heads, as far as these are known."""
        heads = self.model.num_attention_heads if self.model else None
        known = heads or self.world_size or self.config.frames
        return [size for size in divisors(known) if not (self.world_size or size) % size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A rule's verdict without its code."""

    at: str
    fact: str
    hint: str


Check = Callable[[Run], Iterator[Broken]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A check and what is known about it."""

    code: str
    name: str
    reads: tuple[str, ...]
    """Settings the check depends on: it is not asked while one of them holds no legal value."""
    check: Check
    why: str

    def findings(self, run: Run) -> list[Finding]:
        """Every place of `run` that breaks the rule."""
        return [
            Finding(code=self.code, at=broken.at, fact=broken.fact, hint=broken.hint)
            for broken in self.check(run)
        ]


def rule(code: str, name: str, *, reads: tuple[str, ...]) -> Callable[[Check], Rule]:
    """Makes a Rule of a check; its docstring is the reason. `rules.RULES` lists those that are asked."""

    def wrap(check: Check) -> Rule:
        assert check.__doc__, f"rule {code} gives no reason"
        return Rule(code=code, name=name, reads=reads, check=check, why=check.__doc__)

    return wrap


def one_of(values: list[int] | list[str]) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
