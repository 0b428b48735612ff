"""A run from its parts to its last checkpoint: data, steps, report, checkpoints, evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from evenspan.comm.fingerprint import compare_fingerprints
from evenspan.config.tasks import AnyRunConfig
from evenspan.topology.degrees import Axis
from evenspan.train.checkpoint import Progress, save_checkpoint
from evenspan.train.evaluate import evaluate
from evenspan.train.metrics import Reporter
from evenspan.train.optimizer import learning_rate, set_learning_rate
from evenspan.train.run import Run, build_run, resume
from evenspan.train.step import StepResult, train_step
from evenspan.train.task import Batch

logger = logging.getLogger("evenspan")


def train(config: AnyRunConfig, *, logdir: Path, device: torch.device) -> None:
    """Train `config` to `training.max_iters` optimizer steps in `logdir`, resuming what lies there.

    Collective over the default process group. Leaves config.yaml, metrics.jsonl, tensorboard/, checkpoints/
    and samples/ behind. Raises the named errors of evenspan.errors.
    """
    run = build_run(config, logdir=logdir, device=device)
    with ExitStack() as stack:
        stack.callback(run.directory.release)
        progress = resume(run)
        reporter = open_reporter(run, progress, stack)
        loader = stack.enter_context(run.loader(progress))
        first = progress.step
        for step in range(first, config.training.max_iters):
            started = time.perf_counter()  # before the batches: waiting for data counts
            batches = [batch.to(device) for batch in loader.step(step)]
            if step == first or _due(step, config.training.fingerprint_interval):
                check_same_samples(run, batches)
            result, progress = one_step(run, batches, step=step, progress=progress)
            report_step(run, reporter, result, progress, started=started)
            after_step(run, reporter, progress)
    logger.info("finished %d steps: %s", progress.step, run.directory.root)


def one_step(
    run: Run, batches: Sequence[Batch], *, step: int, progress: Progress
) -> tuple[StepResult, Progress]:
    """Step and average; returns the reduced facts and the progress after the step."""
    set_learning_rate(run.optimizer, learning_rate(step, run.config.training))
    result = train_step(
        run.model,
        run.optimizer,
        batches,
        run.objective,
        step=step,
        max_grad_norm=run.config.training.max_grad_norm,
        loss_group=run.topology.loss_group,
    )
    run.ema.update(run.model, step=step + 1)
    return result, Progress(step=step + 1, samples=progress.samples + run.schedule.global_batch)


def check_same_samples(run: Run, batches: Sequence[Batch]) -> None:
    """Ranks that differ only on context or tensor must read the same samples: compare, name who differs."""
    groups = [run.topology.group(axis) for axis in (Axis.CONTEXT, Axis.TENSOR)]
    for batch in batches:
        compare_fingerprints(batch.fingerprint, groups=groups, sample_ids=batch.sample_ids)


def report_step(
    run: Run, reporter: Reporter | None, result: StepResult, progress: Progress, *, started: float
) -> None:
    """Rank 0 records the step's facts."""
    if reporter is None:
        return
    seconds = time.perf_counter() - started
    facts = asdict(result)
    numbers = {
        f"loss_{run.task.unit}": facts.pop("loss_count"),
        **facts,
        "lr": learning_rate(progress.step - 1, run.config.training),
        "seconds": seconds,
        "tokens_per_s": run.tokens_per_step / seconds,
        "samples": progress.samples,
    }
    reporter.step(progress.step, numbers)


def after_step(run: Run, reporter: Reporter | None, progress: Progress) -> None:
    """Checkpoint and evaluate where the configuration asks for it; both always happen after the last step."""
    last = progress.step == run.config.training.max_iters
    if last or _due(progress.step, run.config.checkpoints.interval):
        path = save_checkpoint(
            run.directory.checkpoints,
            model=run.model,
            optimizer=run.optimizer,
            ema=run.ema,
            progress=progress,
            keep=run.config.checkpoints.max_checkpoints,
        )
        logger.info("checkpoint %s", path)
    interval = run.task.evaluation_interval
    if interval and (last or _due(progress.step, interval)):
        evaluate(run, reporter, progress)


def open_reporter(run: Run, progress: Progress, stack: ExitStack) -> Reporter | None:
    """Rank 0's reporter, with each rank's share of the work as its first record; None on other ranks."""
    unit, context = run.task.unit, run.topology.coordinates.context
    share = run.task.layout.share(context)
    facts = {
        "rank": dist.get_rank(),
        unit: [share.start, share.stop],
        f"valid_{unit}": run.task.layout.valid(context).count,
        "local_shape": run.task.local_shape(run.topology),
    }
    ranks: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, facts)
    if dist.get_rank() != 0:
        return None
    for rank in ranks:
        logger.info(
            "rank %s holds %s %s, local shape %s", rank["rank"], unit, rank[unit], rank["local_shape"]
        )
    reporter = stack.enter_context(
        Reporter(
            run.directory,
            total_steps=run.config.training.max_iters,
            start_step=progress.step,
            interval=run.config.logging.interval,
            tensorboard=run.config.logging.tensorboard,
        )
    )
    reporter.record("layout", progress.step, {"ranks": ranks})
    return reporter


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
