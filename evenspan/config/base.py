"""What every run's schema has, whatever it trains on.

Every field has one default, one unit, and no second name. Other spellings are translated before they get
here, see `spellings`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

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
        description="frames or tokens that do not divide: refuse, or pad with some that nobody sees",
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


class BaseRunConfig(Section):
    """One training run, without what it trains on."""

    sequence_parallel_size: Degree = Field(
        default=1, description="ranks that share one sequence (context axis)"
    )
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _context_is_one_setting(self) -> Self:
        context = self.parallel.mesh.context
        if context is not None and context != self.sequence_parallel_size:
            raise ValueError(
                f"parallel.mesh.context={context} and sequence_parallel_size={self.sequence_parallel_size} "
                f"are one setting; write only sequence_parallel_size"
            )
        return self
