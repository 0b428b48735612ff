"""A few real training steps of a recipe on ranks and in one process, with what each rank saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenspan.ranks import RankContext, RankPool
from evenspan.testing.recipe import Recipe
from evenspan.topology.degrees import Degrees
from evenspan.topology.from_config import solve_degrees

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenspan.config.tasks import AnyRunConfig

STEPS = 3
SMOKE = {
    "training.max_iters": str(STEPS),
    "training.warmup_steps": "0",
    "evaluation.interval": "0",
    "checkpoints.interval": "0",
    "logging.tensorboard": "false",
    "data.prefetch": "0",
    "parallel.mixed_precision": "fp64",
}
"""Settings of a smoke run, where the recipe's task has them; the test run's overrides win over them."""

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2}
"""Relative difference from one process over a few steps, by `parallel.mixed_precision`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """What one rank saw of a smoke run."""

    losses: tuple[float, ...]
    """Loss of each step, as the rank itself knows it."""
    grad_norms: tuple[float, ...]
    batches: tuple[tuple[bytes, ...], ...]
    """Per step the content fingerprints of its micro-batches: equal on ranks that share samples."""
    sample_ids: tuple[tuple[int, ...], ...]
    """Per step the samples it read."""
    inputs: dict[str, tuple[int, ...]]
    """Local shape of the first tensor argument each module got in the first forward, by module name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoke:
    """A smoke run on ranks beside the same steps in one process."""

    recipe: Recipe
    config: AnyRunConfig
    degrees: Degrees
    ranks: tuple[RankRun, ...]
    """In rank order."""
    one_process: RankRun

    @property
    def tolerance(self) -> float:
        """How far a loss may be from one process, relative."""
        return TOLERANCE[self.config.parallel.mixed_precision]


def smoke_overrides(recipe: Recipe) -> list[str]:
    """Those of SMOKE that the recipe's task has."""
    known = recipe.config().model_dump()
    return [f"{key}={value}" for key, value in SMOKE.items() if _has(known, key)]


def run_smoke(recipe: Recipe, pool: RankPool, *, directory: Path) -> Smoke:
    """Train a few steps on the ranks of `pool` and in one process; the same global batches in both.

    `directory` takes the smoke data (`data.smoke_data(directory)` of the recipe, if it has a data package)
    and the run directories. Raises ConfigError before a rank starts, RankFailure with every rank's
    traceback after.
    """
    extra = smoke_overrides(recipe)
    if (recipe.root / "data" / "__init__.py").is_file():
        extra += recipe.module("data").smoke_data(directory / "data")
    config = recipe.config(extra=extra, world_size=pool.world_size)
    degrees = solve_degrees(config, world_size=pool.world_size)
    ranks = pool.run(train_steps, config, directory / "ranks")
    alone = RankPool(1)
    try:
        one = alone.run(train_steps, one_process(config, degrees), directory / "one")[0]
    finally:
        alone.close()
    return Smoke(recipe=recipe, config=config, degrees=degrees, ranks=tuple(ranks), one_process=one)


def one_process(config: AnyRunConfig, degrees: Degrees) -> AnyRunConfig:
    """The configuration of one process that takes the same global batches: dp becomes accumulation."""
    written = config.model_dump()
    written["sequence_parallel_size"] = 1
    written["parallel"]["mesh"] = {"replicate": 1, "shard": 1, "context": None, "tensor": 1}
    written["parallel"]["backend_kwargs"]["sequence_parallel"] = False
    written["training"]["gradient_accumulation_steps"] *= degrees.dp
    return type(config).model_validate(written)


def train_steps(ctx: RankContext, config: AnyRunConfig, logdir: Path) -> RankRun:
    """Run on every rank of a pool: the run's steps from the first on, without checkpoints."""
    from evenspan.train.checkpoint import Progress
    from evenspan.train.loop import one_step
    from evenspan.train.run import build_run

    run = build_run(config, logdir=logdir, device=ctx.device)
    inputs: dict[str, tuple[int, ...]] = {}
    _record_inputs(run.model, inputs)
    progress = Progress(step=0, samples=0)
    losses, norms, prints, ids = [], [], [], []
    with run.loader(progress) as loader:
        for step in range(config.training.max_iters):
            batches = list(loader.step(step))
            result, progress = one_step(run, batches, step=step, progress=progress)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            prints.append(tuple(batch.fingerprint for batch in batches))
            ids.append(tuple(sample for batch in batches for sample in batch.sample_ids))
    return RankRun(
        losses=tuple(losses),
        grad_norms=tuple(norms),
        batches=tuple(prints),
        sample_ids=tuple(ids),
        inputs=inputs,
    )


def _record_inputs(model: nn.Module, inputs: dict[str, tuple[int, ...]]) -> None:
    """Note in `inputs` the shape of the first tensor each module is called with, once."""
    import torch

    def recorder(name: str) -> Any:
        def record(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tensors = [item for item in (*arguments, *keywords.values()) if isinstance(item, torch.Tensor)]
            if tensors:
                inputs.setdefault(name, _local_shape(tensors[0]))

        return record

    for name, module in model.named_modules():
        # After the hooks that lay tensors out, so that what the module computes on is seen.
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)


def _local_shape(tensor: Tensor) -> tuple[int, ...]:
    from torch.distributed.tensor import DTensor

    return tuple(tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape)


def _has(known: dict[str, Any], key: str) -> bool:
    value: Any = known
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True
