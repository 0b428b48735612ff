"""The network of this recipe: the causal Wan DiT, which carries its plan on its class."""

from evenspan.config.schema import RunConfig
from evenspan.model.wan import CausalWan
from evenspan.train.build import model_config


def build(config: RunConfig) -> CausalWan:
    """The single-device model of `config`, weights not yet drawn."""
    return CausalWan(model_config(config), core=config.parallel.attention)
