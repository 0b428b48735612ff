"""The parts of a run on one rank, and where it resumes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import AdamW

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch, VideoSample, collate
from evenspan.data.latents_dataset import LatentsDataset
from evenspan.data.loader import MicroBatchLoader
from evenspan.data.sampler import SampleSchedule
from evenspan.data.video_dataset import VideoDataset
from evenspan.errors import RunError
from evenspan.model.wan import CausalWan
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.layout import FrameLayout
from evenspan.topology.mesh import Topology, build_topology
from evenspan.train.build import (
    build_model,
    build_schedule,
    open_dataset,
    tokens_per_frame,
)
from evenspan.train.checkpoint import Progress, list_checkpoints, load_checkpoint, recover
from evenspan.train.ema import Ema
from evenspan.train.objective import Objective, build_objective
from evenspan.train.optimizer import build_optimizer
from evenspan.train.run_dir import RunDir

logger = logging.getLogger("evenspan")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a training run holds on one rank."""

    config: RunConfig
    directory: RunDir
    topology: Topology
    layout: FrameLayout
    objective: Objective
    model: CausalWan
    optimizer: AdamW
    ema: Ema
    dataset: VideoDataset | LatentsDataset
    schedule: SampleSchedule

    def loader(self, progress: Progress) -> MicroBatchLoader[VideoSample, VideoBatch]:
        """The micro-batches of this rank's dp slot from `progress` on, reduced to the frames it owns."""
        coordinates = self.topology.coordinates
        return MicroBatchLoader(
            self.dataset,
            collate=collate,
            schedule=self.schedule.resumed(step=progress.step, samples_seen=progress.samples),
            frames=self.layout.share(coordinates.context),
            dp_rank=coordinates.dp,
            dp_degree=self.topology.degrees.dp,
            micro_batches=self.config.training.gradient_accumulation_steps,
            prefetch=self.config.data.prefetch,
        )

    @property
    def tokens_per_step(self) -> int:
        """Latent tokens of the valid frames of one global batch; clean and noisy copies count once."""
        return self.schedule.global_batch * self.layout.frames * tokens_per_frame(self.config)


def build_run(config: RunConfig, *, logdir: Path, device: torch.device) -> Run:
    """The parts of a run; claims `logdir` first, so that nothing is built for a refused directory."""
    directory = RunDir(logdir)
    degrees = solve_degrees(config, world_size=dist.get_world_size())
    claim_on_rank0(directory, config)
    topology = build_topology(degrees, device=device)
    layout = frame_layout(config)
    dataset = open_dataset(config)
    model = build_model(config, topology)
    if degrees.context > 1:
        logger.info(
            "[SP] Sequence Parallel enabled, sp_size=%d, dp_size=%d, world_size=%d",
            degrees.context,
            degrees.dp,
            degrees.world_size,
        )
    return Run(
        config=config,
        directory=directory,
        topology=topology,
        layout=layout,
        objective=build_objective(config, layout, seed=config.logging.seed),
        model=model,
        optimizer=build_optimizer(model.parameters(), config.training),
        ema=Ema(model, decay=config.training.ema_weight, start_step=config.training.ema_start_step),
        dataset=dataset,
        schedule=build_schedule(config, size=len(dataset), dp_degree=degrees.dp),
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


def claim_on_rank0(directory: RunDir, config: RunConfig) -> None:
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
