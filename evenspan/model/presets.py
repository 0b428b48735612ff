"""Named model sizes. Torch-free: the launch-time check reads head counts from here."""

from __future__ import annotations

from evenspan.errors import ModelError, nearest
from evenspan.model.wan_config import WanConfig

PRESETS: dict[str, WanConfig] = {
    # Wan 2.2 text-and-image-to-video, 5.0 B parameters: transformer/config.json of the published weights.
    "Wan2.2-TI2V-5B": WanConfig(
        num_layers=30,
        num_attention_heads=24,
        attention_head_dim=128,
        ffn_dim=14336,
        in_channels=48,
        out_channels=48,
    ),
    # About 36 M parameters: learns a few clips on one GPU, or slowly on a CPU.
    "wan-small": WanConfig(
        num_layers=8,
        num_attention_heads=8,
        attention_head_dim=64,
        ffn_dim=2048,
        in_channels=48,
        out_channels=48,
        text_dim=256,
    ),
    # About 4 M parameters: a CPU takes a training step in well under a second.
    "wan-tiny": WanConfig(
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=64,
        ffn_dim=768,
        in_channels=48,
        out_channels=48,
        text_dim=64,
    ),
    # For proofs and tests: every part present, nothing large. 12 features split 4, 4, 4 over the three axes.
    "wan-nano": WanConfig(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=12,
        ffn_dim=96,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
    ),
}


def model_preset(name: str) -> WanConfig:
    """The configuration called `name`. Raises ModelError M101 with the nearest names."""
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        raise ModelError(
            "M101",
            f"no model is called {name!r}" + (f"; nearest: {', '.join(near)}" if near else ""),
            hint=f"model_kwargs.model_name is one of {', '.join(PRESETS)}",
        )
    return PRESETS[name]
