"""The task that a configuration asks for."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.topology.degrees import Degrees
from evenspan.train.task import AnyTask
from evenspan.train.video import VideoTask


def build_task(config: RunConfig, degrees: Degrees) -> AnyTask:
    """The task of `config` at `degrees`; opens no data and builds no model yet."""
    return VideoTask(config, degrees)
