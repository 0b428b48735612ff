"""The closed schema of a text run. Every field has one default, one unit, and no second name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evenspan.config.base import BaseRunConfig, Override, PositiveInt, Section


class DecoderModelConfig(Section):
    """Which decoder."""

    model_name: str = Field(default="Qwen3-tiny", description="preset of the decoder, with random weights")
    model_path: str | None = Field(
        default=None, description="Hugging Face folder of a Qwen3 to start from, instead of a preset"
    )
    overrides: dict[str, Override] = Field(
        default_factory=dict, description="fields of the preset to replace, for small experiments"
    )


class TextDataConfig(Section):
    """Where documents come from and how they are cut."""

    data_path: str = Field(
        min_length=1,
        description="text file, folder of text files, or stdlib: the sources of Python's standard library",
    )
    pattern: str = Field(default="**/*.py", min_length=1, description="files taken from a folder, as a glob")
    tokenizer: str = Field(
        default="byte", min_length=1, description="byte, or the folder of a Hugging Face tokenizer"
    )
    sequence_length: PositiveInt = Field(description="tokens of a sample, over all ranks")
    prefetch: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="micro-batches each rank prepares in the background; 0 prepares none",
    )


class TextRunConfig(BaseRunConfig):
    """One training run on text."""

    task: Literal["text"] = Field(description="what is trained: video, or text")
    model_kwargs: DecoderModelConfig = DecoderModelConfig()
    data: TextDataConfig
