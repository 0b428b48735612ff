"""The closed schema of a run. Every field has one default, one unit, and no second name.

Other spellings (LongLive's groups and flat names) are translated before they get here, see `spellings`.
Shapes are latent shapes: what the VAE or codec puts out, not pixels.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGEST_SIZE = 2**31 - 1
LARGEST_COUNT = 2**63 - 1
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Degree = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
FreeDegree = Annotated[int, Field(ge=-1, le=LARGEST_SIZE)]
Override = int | float | bool | str | list[int]


class Section(BaseModel):
    """Closed and frozen: an unknown key is an error, a value never changes after it was checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False
    )


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


class MeshConfig(Section):
    """Degrees of the mesh axes, outer to inner. At most one is -1: whatever the world size leaves."""

    replicate: FreeDegree = Field(
        default=1, description="copies of the sharded parameters (HSDP); multiplies the batch"
    )
    shard: FreeDegree = Field(
        default=-1, description="ranks that share one copy of the parameters; multiplies the batch"
    )
    context: Degree | None = Field(
        default=None, description="the same setting as sequence_parallel_size; null follows it"
    )
    tensor: FreeDegree = Field(default=1, description="ranks that split projections by heads or width")


class Fsdp2Config(Section):
    """How FSDP2 holds parameters."""

    reshard_after_forward: bool = Field(
        default=True, description="free gathered parameters between forward and backward"
    )
    cpu_offload: bool = Field(
        default=False, description="keep sharded parameters and optimizer state in host memory"
    )


class BackendConfig(Section):
    """Switches of the parallel backends."""

    sequence_parallel: bool = Field(
        default=False, description="tensor-mesh sequence parallelism; needs tensor and shard > 1"
    )
    fsdp2: Fsdp2Config = Fsdp2Config()


class ParallelConfig(Section):
    """How one step is spread over ranks. Only `mixed_precision` changes the numbers of a step."""

    mesh: MeshConfig = MeshConfig()
    padding: Literal["error", "auto"] = Field(
        default="error",
        description="frames that do not divide: refuse, or pad with frames nobody sees and no loss counts",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none", description="what the backward pass recomputes; exchanges are never repeated"
    )
    mixed_precision: Literal["fp32", "bf16", "fp64"] = Field(
        default="fp32", description="dtype of parameters in compute; bf16 reduces gradients in fp32"
    )
    attention: Literal["auto", "dense", "segments", "flex", "varlen"] = Field(
        default="auto", description="executor of the attention core; auto is segments on CPU and flex on CUDA"
    )
    backend_kwargs: BackendConfig = BackendConfig()


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


class TrainingConfig(Section):
    """Optimizer and step counts. A step is one optimizer update."""

    lr: float = Field(default=1e-5, gt=0, description="peak step size, reached after warmup_steps")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW decay per step, times lr")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW decay of the first moment")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW decay of the second moment")
    batch_size: PositiveInt = Field(
        default=1, description="samples per data-parallel replica and micro-batch"
    )
    gradient_accumulation_steps: PositiveInt = Field(default=1, description="micro-batches per step")
    max_iters: PositiveInt = Field(default=600, description="steps of the whole run")
    warmup_steps: Count = Field(default=0, description="steps of linear warm-up")
    min_lr_ratio: Fraction = Field(
        default=1.0, description="end of the cosine as a share of lr; 1 keeps lr constant"
    )
    max_grad_norm: float = Field(
        default=10.0, gt=0, description="global gradient norm above which gradients are scaled down"
    )
    ema_weight: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="decay of the averaged parameters per step; 0 follows the weights",
    )
    ema_start_step: Count = Field(default=0, description="step at which averaging starts")
    fingerprint_interval: Count = Field(
        default=100,
        description="steps between comparisons of a context group's batch, besides each start's first; 0 off",
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


class CheckpointConfig(Section):
    """Sharded checkpoints."""

    interval: Count = Field(default=0, description="steps between checkpoints; 0 only at the end")
    max_checkpoints: Count = Field(default=3, description="newest checkpoints kept; 0 keeps all")
    auto_resume: bool = Field(
        default=True,
        description="continue from the newest checkpoint in --logdir; false refuses a --logdir that has one",
    )


class LoggingConfig(Section):
    """Seeds and what is written down."""

    seed: Count = Field(
        default=0, description="seed of every random draw of the run; 0 is a seed like any other"
    )
    interval: PositiveInt = Field(
        default=1, description="steps between printed lines; metrics.jsonl holds every step"
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard events")


class RunConfig(Section):
    """One training run."""

    model_kwargs: ModelConfig = ModelConfig()
    sequence_parallel_size: Degree = Field(
        default=1, description="ranks that share one sequence (context axis)"
    )
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
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _context_is_one_setting(self) -> RunConfig:
        context = self.parallel.mesh.context
        if context is not None and context != self.sequence_parallel_size:
            raise ValueError(
                f"parallel.mesh.context={context} and sequence_parallel_size={self.sequence_parallel_size} "
                f"are one setting; write only sequence_parallel_size"
            )
        return self

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
