"""The closed schema of a video run: flow matching on clips.

Shapes are latent shapes: what the VAE or codec puts out, not pixels.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from evenspan.config.base import BaseRunConfig, Count, FreeDegree, Override, PositiveInt, Section


class ModelConfig(Section):
    """Which network, and how its attention sees the past."""

    model_name: str = Field(
        default="Wan2.2-TI2V-5B", description="preset of the network; fixes heads, layers, channels"
    )
    timestep_shift: float = Field(
        default=5.0, gt=0, description="flow-matching shift s; larger spends more steps at high noise"
    )
    local_attn_size: FreeDegree = Field(
        default=-1, description="latent frames a block sees before itself; -1 sees the whole past"
    )
    sink_size: Count = Field(
        default=0, description="first latent frames that stay visible outside the window"
    )
    overrides: dict[str, Override] = Field(
        default_factory=dict, description="fields of the preset to replace, for small experiments"
    )


class AlgorithmConfig(Section):
    """The objective."""

    teacher_forcing: bool = Field(
        default=True, description="noisy blocks see the clean past of their own video"
    )
    causal: bool = Field(default=True, description="blocks see no later block")
    i2v: bool = Field(
        default=False, description="latent frame 0 is given, not generated, and left out of the loss"
    )
    num_train_timestep: int = Field(default=1000, gt=0, le=1_000_000, description="noise table entries")
    noise_augmentation_max_timestep: Count = Field(
        default=0, description="largest timestep of noise on the clean copy; 0 off"
    )


class CodecConfig(Section):
    """What turns pixels into latents and back."""

    name: Literal["pixel"] = Field(
        default="pixel", description="pixel: invertible space-to-depth, no weights"
    )
    spatial: PositiveInt = Field(default=4, description="pixels per latent along height and width")
    temporal: PositiveInt = Field(default=1, description="raw frames per latent frame after the first")


class TextConfig(Section):
    """What turns captions into embeddings."""

    length: PositiveInt = Field(default=16, description="text tokens per prompt")


class DataConfig(Section):
    """Where samples come from and how a clip is cut out of them."""

    data_path: str = Field(
        min_length=1, description="directory with video/<sample>/<k>.mp4 and caption/<sample>/<k>.json"
    )
    kind: Literal["video", "latents"] = Field(
        default="video", description="raw videos, or safetensors of latents"
    )
    codec: CodecConfig = CodecConfig()
    text: TextConfig = TextConfig()
    fps: float = Field(default=24.0, gt=0, le=1000, description="raw frames per second of a clip")
    allow_padding: bool = Field(
        default=False, description="accept samples shorter than the clip; missing frames carry no loss"
    )
    min_latent_frames: Count = Field(
        default=0, description="latent frames a short sample must have; 0 accepts any"
    )
    uniform_prompt: bool = Field(
        default=False, description="a clip stays inside one video, so one prompt describes it"
    )
    max_chunks_per_shot: Count = Field(
        default=0, description="blocks taken from one video before a forced cut; 0 no limit"
    )
    scene_cut_prefix: str = Field(
        default="The scene transitions. ", description="put before the prompt of a new shot"
    )
    random_start: bool = Field(
        default=True, description="draw the first frame of a clip; false starts at the first frame"
    )
    prefetch: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="micro-batches each rank prepares in the background; 0 prepares none",
    )


class EvaluationConfig(Section):
    """Clips generated during training. Evaluation never touches the training state."""

    interval: Count = Field(default=0, description="steps between evaluations; 0 off")
    num_frames: Count = Field(default=0, description="latent frames to generate; 0 is the training length")
    sampling_steps: PositiveInt = Field(default=20, description="denoising steps per block")
    guidance_scale: float = Field(
        default=1.0, ge=0, description="classifier-free guidance; 1 runs no unconditional pass"
    )
    use_ema: bool = Field(default=True, description="generate from the averaged parameters")
    prompts: list[str] = Field(
        default_factory=list, description="one clip per prompt; empty takes those of the first four samples"
    )


class RunConfig(BaseRunConfig):
    """One training run on video."""

    task: Literal["video"] = Field(default="video", description="what is trained: video, or text")
    model_kwargs: ModelConfig = ModelConfig()
    num_frame_per_block: PositiveInt = Field(
        default=1, description="latent frames of one autoregressive block"
    )
    image_or_video_shape: Annotated[
        tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt],
        Field(
            strict=False,
            description="latent shape of one micro-batch: batch, frames, channels, height, width",
        ),
    ]
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def frames(self) -> int:
        """Latent frames of one clip, over all ranks."""
        return self.image_or_video_shape[1]

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self.image_or_video_shape[2]

    @property
    def latent_height(self) -> int:
        """Latent rows."""
        return self.image_or_video_shape[3]

    @property
    def latent_width(self) -> int:
        """Latent columns."""
        return self.image_or_video_shape[4]
