"""Sizes of a Qwen3 decoder, under the names of Hugging Face's `Qwen3Config`. Torch-free: checks read them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenspan.errors import ModelError, nearest

MODEL_TYPE = "qwen3"
CONFIG_NAME = "config.json"
_LARGEST_SIZE = 2**31 - 1
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_POSITIVE = ("rms_norm_eps", "rope_theta", "initializer_range")
_SWITCHES = ("tie_word_embeddings", "attention_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A Qwen3 with full attention, the default rotation and no dropout. Raises ModelError M102."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    """Whether the head is the embedding."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_SIZE:
                raise _bad(name, value, f"a whole number from 1 to {_LARGEST_SIZE}")
        for name in _POSITIVE:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise _bad(name, value, "a finite number above 0")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "true or false")
        if self.head_dim % 2:
            raise _bad("head_dim", self.head_dim, "even: the rotation turns pairs of features")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _bad(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads {self.num_attention_heads}",
            )

    def with_overrides(self, overrides: Mapping[str, object]) -> DecoderConfig:
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
        return dataclasses.replace(self, **overrides)  # type: ignore[arg-type]


# The small ones' vocabulary is the byte tokenizer's 258 ids, rounded up so that 2, 4 and 8 ranks divide it.
DECODER_PRESETS: dict[str, DecoderConfig] = {
    # Qwen/Qwen3-8B and Qwen/Qwen3-0.6B: config.json of the published weights.
    "Qwen3-8B": DecoderConfig(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "Qwen3-0.6B": DecoderConfig(
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    # About 1 M parameters: a CPU takes a step of a thousand tokens in well under a second.
    "Qwen3-tiny": DecoderConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=264,
    ),
    # For proofs and tests: two layers, a tied head, fewer key/value heads than query heads.
    "Qwen3-nano": DecoderConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=264,
        tie_word_embeddings=True,
    ),
}


def decoder_config(
    model_name: str, *, model_path: str | None = None, overrides: Mapping[str, object] | None = None
) -> DecoderConfig:
    """The preset `model_name` with `overrides`, or what stands in the folder `model_path`.

    Raises ModelError M101 (name), M102 (value), M103 (field), M107 (folder), M108 (what this decoder does not
    do), M109 (overrides of a folder's sizes).
    """
    if model_path is not None:
        if overrides:
            raise ModelError(
                "M109",
                f"overrides of {', '.join(overrides)} beside model_path {model_path}, whose weights have "
                "their sizes",
                hint="leave out model_kwargs.overrides, or model_kwargs.model_path",
            )
        return read_decoder_folder(model_path)
    if model_name not in DECODER_PRESETS:
        near = nearest(model_name, DECODER_PRESETS)
        raise ModelError(
            "M101",
            f"no decoder is called {model_name!r}" + (f"; nearest: {', '.join(near)}" if near else ""),
            hint=f"model_kwargs.model_name is one of {', '.join(DECODER_PRESETS)}",
        )
    return DECODER_PRESETS[model_name].with_overrides(overrides or {})


def read_decoder_folder(folder: str | Path) -> DecoderConfig:
    """The sizes in a Hugging Face folder of a Qwen3. Raises ModelError M107, M108, M102."""
    path = Path(folder) / CONFIG_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_folder(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _no_folder(f"{path} is no JSON: {error}") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != MODEL_TYPE:
        raise _no_folder(f"{path} describes a model of type {kind!r}, not {MODEL_TYPE!r}")
    _refuse_other_arithmetic(path, content)
    values = {
        field.name: content[field.name]
        for field in dataclasses.fields(DecoderConfig)
        if field.name in content
    }
    theta = _rope(content).get("rope_theta")
    if theta is not None:
        values["rope_theta"] = theta
    missing = [name for name in _COUNTS if name not in values]
    if missing:
        raise _no_folder(f"{path} says nothing of {', '.join(missing)}")
    return DecoderConfig(**values)


def _rope(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotation's settings, which transformers 4 and 5 write under two names."""
    return content.get("rope_parameters") or content.get("rope_scaling") or {}


def _refuse_other_arithmetic(path: Path, content: Mapping[str, Any]) -> None:
    rope = _rope(content)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    layers = set(content.get("layer_types") or ["full_attention"])
    faults = []
    if content.get("use_sliding_window") or layers != {"full_attention"}:
        faults.append("sliding-window attention")
    if content.get("attention_dropout"):
        faults.append(f"attention dropout {content['attention_dropout']}")
    if rope_type != "default":
        faults.append(f"a rotation of type {rope_type}")
    if faults:
        raise ModelError(
            "M108",
            f"{path} asks for {', '.join(faults)}",
            hint="use a Qwen3 with full attention, the default rotation and no attention dropout",
        )


def _no_folder(fact: str) -> ModelError:
    return ModelError(
        "M107", fact, hint="give as model_kwargs.model_path a folder of save_pretrained that holds a Qwen3"
    )


def _bad(name: str, value: object, allowed: str) -> ModelError:
    return ModelError("M102", f"model field {name} is {value!r}", hint=f"{name} must be {allowed}")
