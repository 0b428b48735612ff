"""The schemas by task: what a run trains on decides which settings it has."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.config.text_schema import TextRunConfig

AnyRunConfig = RunConfig | TextRunConfig
Schema = type[RunConfig] | type[TextRunConfig]

DEFAULT_TASK = "video"
SCHEMAS: dict[str, Schema] = {"video": RunConfig, "text": TextRunConfig}
"""A file without `task` is a video run."""
