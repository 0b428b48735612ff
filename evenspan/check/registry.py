"""What a rule is: a small pure function with a code, a name, a reason and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from evenspan.config.schema import RunConfig
from evenspan.config.tasks import AnyRunConfig
from evenspan.config.text_schema import TextRunConfig
from evenspan.errors import Finding, ModelError, TopologyError
from evenspan.model.decoder_config import DecoderConfig, decoder_config
from evenspan.topology.degrees import divisors
from evenspan.topology.from_config import solve_degrees

if TYPE_CHECKING:
    from evenspan.model.wan_config import WanConfig


@dataclass(frozen=True)
class Run:
    """What a rule looks at: the configuration, and how many ranks will run it."""

    config: AnyRunConfig
    world_size: int | None
    """None when nobody said how many ranks there will be: rules about the world then stay silent."""
    check_paths: bool = True
    """Whether rules may look at this machine: its files and devices."""

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        return self.config.sequence_parallel_size

    @property
    def video(self) -> RunConfig:
        """The configuration of a video run."""
        assert isinstance(self.config, RunConfig), "asked by a rule for video"
        return self.config

    @property
    def text(self) -> TextRunConfig:
        """The configuration of a text run."""
        assert isinstance(self.config, TextRunConfig), "asked by a rule for text"
        return self.config

    @property
    def tensor(self) -> int | None:
        """The tensor degree; None while it is no degree, or -1 in a world of unknown size."""
        tensor = self.config.parallel.mesh.tensor
        if tensor != -1:
            return tensor or None
        if self.world_size is None:
            return None
        try:
            return solve_degrees(self.config, world_size=self.world_size).tensor
        except TopologyError:  # T102 and T103 say why
            return None

    @cached_property
    def sizes(self) -> Sizes | None:
        """The widths that ranks share; None when the model is unknown or its settings do not fit."""
        if isinstance(self.config, TextRunConfig):
            return None if isinstance(self.decoder, ModelError) else _decoder_sizes(self.decoder)
        return None if self.model is None else _wan_sizes(self.model)

    @cached_property
    def decoder(self) -> DecoderConfig | ModelError:
        """The decoder of a text run, or what is wrong with it."""
        wanted = self.text.model_kwargs
        try:
            return decoder_config(wanted.model_name, model_path=wanted.model_path, overrides=wanted.overrides)
        except ModelError as error:
            return error

    @cached_property
    def model(self) -> WanConfig | None:
        """The preset with its overrides; None when it is unknown or the overrides do not fit."""
        from evenspan.model.presets import model_preset

        wanted = self.video.model_kwargs
        try:
            return model_preset(wanted.model_name).with_overrides(wanted.overrides)
        except (ModelError, TypeError):  # M101 to M103 say which
            return None

    @property
    def legal_contexts(self) -> list[int]:
        """Values of sequence_parallel_size that divide the world and the heads, as far as these are known."""
        known = (self.sizes and self.sizes.heads) or self.world_size or self.config.sequence_parallel_size
        return [size for size in divisors(known) if not (self.world_size or size) % size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Widths of a model that ranks share."""

    name: str
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int | None = None
    """None without one."""


def _decoder_sizes(decoder: DecoderConfig) -> Sizes:
    return Sizes(
        name="the decoder",
        heads=decoder.num_attention_heads,
        kv_heads=decoder.num_key_value_heads,
        ffn=decoder.intermediate_size,
        vocabulary=decoder.vocab_size,
    )


def _wan_sizes(model: WanConfig) -> Sizes:
    heads = model.num_attention_heads
    return Sizes(name="the network", heads=heads, kv_heads=heads, ffn=model.ffn_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A rule's verdict without its code."""

    at: str
    fact: str
    hint: str
    code: str | None = None
    """In place of the rule's, where what it asks for has codes of its own."""


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
    task: str | None = None
    """The only task that the rule is about; None for all."""

    def findings(self, run: Run) -> list[Finding]:
        """Every place of `run` that breaks the rule."""
        return [
            Finding(code=broken.code or self.code, at=broken.at, fact=broken.fact, hint=broken.hint)
            for broken in self.check(run)
        ]


def rule(code: str, name: str, *, reads: tuple[str, ...], task: str | None = None) -> Callable[[Check], Rule]:
    """Makes a Rule of a check; its docstring is the reason. `rules.RULES` lists those that are asked."""

    def wrap(check: Check) -> Rule:
        assert check.__doc__, f"rule {code} gives no reason"
        return Rule(code=code, name=name, reads=reads, check=check, why=check.__doc__, task=task)

    return wrap


def one_of(values: list[int] | list[str]) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
