"""The task that a configuration asks for."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.train.task import AnyTask
from evenspan.train.video import VideoTask


def build_task(config: RunConfig) -> AnyTask:
    """The task of `config`; opens no data and builds no model yet."""
    return VideoTask(config)
