"""The parts of a run on one rank, and where it resumes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from evenspan.config.tasks import AnyRunConfig
from evenspan.data.loader import MicroBatchLoader
from evenspan.data.sampler import SampleSchedule
from evenspan.errors import RunError
from evenspan.topology.from_config import solve_degrees
from evenspan.topology.mesh import Topology, build_topology
from evenspan.train.build import build_schedule
from evenspan.train.checkpoint import Progress, list_checkpoints, load_checkpoint, recover
from evenspan.train.ema import Ema
from evenspan.train.optimizer import build_optimizer
from evenspan.train.run_dir import RunDir
from evenspan.train.task import AnyTask, Objective
from evenspan.train.tasks import build_task

logger = logging.getLogger("evenspan")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a training run holds on one rank."""

    config: AnyRunConfig
    task: AnyTask
    directory: RunDir
    topology: Topology
    objective: Objective[Any]
    model: nn.Module
    optimizer: AdamW
    ema: Ema
    schedule: SampleSchedule

    def loader(self, progress: Progress) -> MicroBatchLoader[Any, Any]:
        """The micro-batches of this rank's dp slot from `progress` on, reduced to the units it owns."""
        coordinates = self.topology.coordinates
        return MicroBatchLoader(
            self.task.dataset,
            collate=self.task.collate,
            schedule=self.schedule.resumed(step=progress.step, samples_seen=progress.samples),
            frames=self.task.layout.share(coordinates.context),
            dp_rank=coordinates.dp,
            dp_degree=self.topology.degrees.dp,
            micro_batches=self.config.training.gradient_accumulation_steps,
            prefetch=self.config.data.prefetch,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch, without padding."""
        return self.schedule.global_batch * self.task.tokens_per_sample


def build_run(config: AnyRunConfig, *, logdir: Path, device: torch.device) -> Run:
    """The parts of a run; claims `logdir` first, so that nothing is built for a refused directory."""
    directory = RunDir(logdir)
    degrees = solve_degrees(config, world_size=dist.get_world_size())
    claim_on_rank0(directory, config)
    topology = build_topology(degrees, device=device)
    task = build_task(config, degrees)
    samples = len(task.dataset)
    model = task.build_model(topology)
    if degrees.context > 1:
        logger.info(
            "[SP] Sequence Parallel enabled, sp_size=%d, dp_size=%d, world_size=%d",
            degrees.context,
            degrees.dp,
            degrees.world_size,
        )
    return Run(
        config=config,
        task=task,
        directory=directory,
        topology=topology,
        objective=task.build_objective(topology),
        model=model,
        optimizer=build_optimizer(model.parameters(), config.training),
        ema=Ema(model, decay=config.training.ema_weight, start_step=config.training.ema_start_step),
        schedule=build_schedule(config, size=samples, dp_degree=degrees.dp),
    )


def resume(run: Run) -> Progress:
    """Load the newest complete checkpoint of the run directory, if there is one.

    Raises RunError R109 when there is one and `auto_resume` is off: a run from step 0 would mix its own with
    those, and the newest by number would be neither kept nor resumed rightly. R110 when it took another
    number of samples a step: the curve would bend there.
    """
    if dist.get_rank() == 0:
        recover(run.directory.checkpoints)
    dist.barrier()
    found = list_checkpoints(run.directory.checkpoints)
    if not found:
        return Progress(step=0, samples=0)
    if not run.config.checkpoints.auto_resume:
        raise RunError(
            "R109",
            f"{run.directory.checkpoints} holds {found[-1].name}, but checkpoints.auto_resume is false",
            hint="give a new --logdir, or set checkpoints.auto_resume=true to go on from there",
        )
    progress = load_checkpoint(found[-1], model=run.model, optimizer=run.optimizer, ema=run.ema)
    if progress.samples != progress.step * run.schedule.global_batch:
        raise _other_global_batch(run, progress)
    logger.info("resumed %s after step %d", found[-1].name, progress.step)
    return progress


def _other_global_batch(run: Run, progress: Progress) -> RunError:
    training = run.config.training
    before, now = progress.samples / max(progress.step, 1), run.schedule.global_batch
    return RunError(
        "R110",
        f"{run.directory.root} took {before:g} samples a step, but batch_size {training.batch_size} x "
        f"gradient_accumulation_steps {training.gradient_accumulation_steps} x dp {run.topology.degrees.dp} "
        f"= {now}",
        hint=f"choose batch_size x gradient_accumulation_steps x dp = {before:g}, or give a new --logdir",
    )


def claim_on_rank0(directory: RunDir, config: AnyRunConfig) -> None:
    """Rank 0 claims the directory; a refusal is raised on every rank, so that none waits for another."""
    refusal: list[tuple[str, str, str] | None] = [None]
    if dist.get_rank() == 0:
        try:
            directory.claim(config)
        except RunError as error:
            refusal = [(error.code, error.fact, error.hint)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        code, fact, hint = refusal[0]
        raise RunError(code, fact, hint=hint)
