"""Asks every rule, and reports all findings of a configuration at once. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenspan.check import (
    data_rules,
    model_rules,
    run_rules,
    shape_rules,
    tensor_rules,
    text_rules,
    topology_rules,
)
from evenspan.check.registry import Rule, Run
from evenspan.config.load import read_config
from evenspan.config.tasks import AnyRunConfig
from evenspan.errors import ConfigError, Finding

RULES: tuple[Rule, ...] = (
    topology_rules.one_free_axis,
    topology_rules.degrees_fill_the_world,
    tensor_rules.sequence_parallel_needs_both,
    shape_rules.frames_fill_ranks_and_blocks,
    shape_rules.positions_fit_the_table,
    shape_rules.patches_cover_the_frame,
    shape_rules.one_batch_size,
    model_rules.known_model,
    model_rules.ranks_divide_heads,
    model_rules.channels_agree,
    model_rules.override_values_fit,
    model_rules.overrides_are_fields,
    tensor_rules.tensor_divides_heads,
    tensor_rules.tensor_divides_kv_heads,
    tensor_rules.tensor_divides_ffn,
    tensor_rules.tensor_divides_vocabulary,
    tensor_rules.tensor_divides_tokens,
    text_rules.context_divides_tokens,
    text_rules.decoder_folder,
    text_rules.folder_has_its_sizes,
    text_rules.documents_exist,
    text_rules.documents_match,
    data_rules.data_exists,
    data_rules.data_has_samples,
    run_rules.teacher_forcing_is_causal,
    run_rules.window_has_a_past,
    run_rules.augmentation_inside_the_table,
    run_rules.warm_up_ends,
    run_rules.shortest_sample,
    run_rules.kernel_needs_a_gpu,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """A configuration and everything that is wrong with it."""

    config: AnyRunConfig | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True when no rule was broken."""
        return not self.findings

    def legal_config(self) -> AnyRunConfig:
        """The configuration; raises ConfigError with every finding when there is one."""
        if self.findings:
            raise ConfigError(self.findings)
        assert self.config is not None, "a result without findings has a config"
        return self.config


def check_config(config: AnyRunConfig, *, world_size: int | None, check_paths: bool = True) -> list[Finding]:
    """Every rule that `config` breaks when `world_size` ranks run it (None: not known yet)."""
    return _ask(config, frozenset(), world_size=world_size, check_paths=check_paths)


def check_file(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    check_paths: bool = True,
) -> CheckResult:
    """Reads a configuration and asks every rule whose settings could be read; all findings together."""
    reading = read_config(path, overrides=overrides)
    if reading.config is None:
        return CheckResult(config=None, findings=reading.findings)
    broken = _ask(reading.config, reading.broken, world_size=world_size, check_paths=check_paths)
    named = tuple(_as_spelled(finding, reading.spelled) for finding in broken)
    return CheckResult(config=reading.config, findings=(*reading.findings, *named))


def _ask(
    config: AnyRunConfig, broken: frozenset[str], *, world_size: int | None, check_paths: bool
) -> list[Finding]:
    run = Run(config=config, world_size=world_size, check_paths=check_paths)
    rules = [rule for rule in RULES if rule.task in (None, config.task)]
    asked = [rule for rule in rules if not any(_covers(read, path) for read in rule.reads for path in broken)]
    return [finding for rule in asked for finding in rule.findings(run)]


def _covers(read: str, path: str) -> bool:
    return path == read or path.startswith(f"{read}.")


def _as_spelled(finding: Finding, spelled: Mapping[str, str]) -> Finding:
    """The finding at the name the user wrote the setting under."""
    return replace(finding, at=spelled.get(finding.at, finding.at))
