"""The task that a configuration asks for."""

from __future__ import annotations

from evenspan.config.tasks import AnyRunConfig
from evenspan.config.text_schema import TextRunConfig
from evenspan.topology.degrees import Degrees
from evenspan.train.task import AnyTask
from evenspan.train.video import VideoTask


def build_task(config: AnyRunConfig, degrees: Degrees) -> AnyTask:
    """The task of `config` at `degrees`; opens no data and builds no model yet."""
    if isinstance(config, TextRunConfig):
        from evenspan.train.text import TextTask  # transformers takes a second to import

        return TextTask(config, degrees)
    return VideoTask(config, degrees)
