"""What a recipe is made of, without a process: its configuration and its model on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenspan.testing.recipe import Recipe
from evenspan.topology.from_config import solve_degrees

if TYPE_CHECKING:
    from torch import nn

    from evenspan.config.tasks import AnyRunConfig
    from evenspan.topology.degrees import Degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """A recipe's configuration with its model; no parameter holds memory."""

    recipe: Recipe
    config: AnyRunConfig
    degrees: Degrees
    model: nn.Module


def build_structure(recipe: Recipe, *, world_size: int) -> Structure:
    """The recipe's model as `model.build(config)` makes it, on the meta device.

    Raises ConfigError with every finding of the configuration, C032 for a recipe without model/__init__.py.
    """
    import torch

    config = recipe.config(world_size=world_size)
    with torch.device("meta"):
        model = recipe.module("model").build(config)
    return Structure(
        recipe=recipe, config=config, degrees=solve_degrees(config, world_size=world_size), model=model
    )
