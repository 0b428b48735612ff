"""The shape of a Wan DiT. Torch-free, so that the launch-time check can read it in milliseconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from evenspan.errors import ModelError, nearest

_LARGEST_SIZE = 2**31 - 1
_HEIGHT_WIDTH_SHARE = 6  # each spatial axis turns 2 * (head_dim // 6) features, time the rest
_COUNTS = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
    "rope_max_seq_len",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig:
    """One DiT; field names and defaults are those of WanTransformer3DModel's `config.json`."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Latent frames, rows and columns under one token; frames must be 1 (timesteps are per frame)."""
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    """Features per head; even, at least 6."""
    in_channels: int = 16
    """Latent channels."""
    out_channels: int = 16
    text_dim: int = 4096
    """Width of the text encoder's output."""
    freq_dim: int = 256
    """Width of the timestep sinusoid; even."""
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    """Must be None: the image branch of Wan 2.1 I2V is not built."""
    added_kv_proj_dim: int | None = None
    """Must be None, for the same reason."""
    rope_max_seq_len: int = 1024
    """Positions per axis, in latent frames, token rows and token columns."""
    pos_embed_seq_len: int | None = None
    """Must be None, for the same reason."""

    def __post_init__(self) -> None:
        patch: object = self.patch_size
        if not isinstance(patch, tuple) or [_is_count(size) for size in patch] != [True] * 3 or patch[0] != 1:
            raise _bad("patch_size", patch, "[1, rows, columns], each at least 1")
        for name in _COUNTS:
            if not _is_count(getattr(self, name)):
                raise _bad(name, getattr(self, name), f"a whole number from 1 to {_LARGEST_SIZE}")
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            raise _bad("attention_head_dim", self.attention_head_dim, "an even number of at least 6")
        if self.freq_dim % 2:
            raise _bad("freq_dim", self.freq_dim, "an even number of at least 2")
        if not isinstance(self.eps, float) or not 0 < self.eps < math.inf:
            raise _bad("eps", self.eps, "a finite number above 0")
        if not isinstance(self.cross_attn_norm, bool):
            raise _bad("cross_attn_norm", self.cross_attn_norm, "true or false")
        if self.qk_norm != "rms_norm_across_heads":
            raise _bad("qk_norm", self.qk_norm, "'rms_norm_across_heads', the one Wan uses")
        for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
            if getattr(self, name) is not None:
                raise _bad(name, getattr(self, name), "null: the image branch of Wan 2.1 I2V is not built")

    @property
    def width(self) -> int:
        """Features per token, E."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rope_dims(self) -> tuple[int, int, int]:
        """Features of a head turned by time, height and width (44, 42, 42 for a head of 128)."""
        spatial = 2 * (self.attention_head_dim // _HEIGHT_WIDTH_SHARE)
        return self.attention_head_dim - 2 * spatial, spatial, spatial

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` x `width`; both must be multiples of the patch."""
        return (height // self.patch_size[1]) * (width // self.patch_size[2])

    def with_overrides(self, overrides: Mapping[str, object]) -> WanConfig:
        """This configuration with some fields replaced; ModelError M103 for a name that is no field."""
        names = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(overrides) - set(names))
        if unknown:
            raise ModelError(
                "M103",
                "no such model field: "
                + "; ".join(
                    f"{name} (nearest: {', '.join(nearest(name, names)) or 'none'})" for name in unknown
                ),
                hint=f"use one of {', '.join(names)}",
            )
        values = dict(overrides)
        patch = values.get("patch_size")
        if isinstance(patch, list):
            values["patch_size"] = tuple(patch)
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_SIZE


def _bad(name: str, value: object, allowed: str) -> ModelError:
    return ModelError("M102", f"model field {name} is {value!r}", hint=f"{name} must be {allowed}")
