"""The schemas by task: what a run trains on decides which settings it has."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.config.text_schema import TextRunConfig
from evenspan.errors import ConfigError, Finding

AnyRunConfig = RunConfig | TextRunConfig
Schema = type[RunConfig] | type[TextRunConfig]

DEFAULT_TASK = "video"
SCHEMAS: dict[str, Schema] = {"video": RunConfig, "text": TextRunConfig}
"""A file without `task` is a video run."""


def video_config(config: AnyRunConfig, *, command: str) -> RunConfig:
    """The configuration of a video run, for what only video has. Raises ConfigError C034 for another task."""
    if isinstance(config, RunConfig):
        return config
    fact = f"{config.task!r}, and {command} is about video"
    hint = "give it a run with task: video"
    raise ConfigError([Finding(code="C034", at="task", fact=fact, hint=hint)])
