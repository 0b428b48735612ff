"""Rules between settings of the objective, the window and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.check.shape_rules import around
from evenspan.config.environment import shows_gpu

WINDOW = "model_kwargs.local_attn_size"
SINK = "model_kwargs.sink_size"


@rule(
    "C010", "teacher-forcing-is-causal", reads=("algorithm.teacher_forcing", "algorithm.causal"), task="video"
)
def teacher_forcing_is_causal(run: Run) -> Iterator[Broken]:
    """Teacher forcing shows a block the clean past; without causality there is no past."""
    if run.video.algorithm.teacher_forcing and not run.video.algorithm.causal:
        fact = "true, but algorithm.causal is false"
        hint = "write algorithm.causal: true, or algorithm.teacher_forcing: false"
        yield Broken(at="algorithm.teacher_forcing", fact=fact, hint=hint)


@rule("C012", "window-has-a-past", reads=(WINDOW, SINK, "algorithm.causal"), task="video")
def window_has_a_past(run: Run) -> Iterator[Broken]:
    """A window limits how far back a block sees; sinks are the frames that stay visible before it."""
    window, sink = run.video.model_kwargs.local_attn_size, run.video.model_kwargs.sink_size
    if window != -1 and not run.video.algorithm.causal:
        fact = f"a window of {window} frames, but algorithm.causal is false"
        yield Broken(at=WINDOW, fact=fact, hint="write -1, or algorithm.causal: true")
    if sink and window == -1:
        fact = f"{sink} sink frames, but without a window every past frame is visible already"
        yield Broken(at=SINK, fact=fact, hint=f"write 0, or set {WINDOW}")


@rule(
    "C013",
    "augmentation-inside-the-table",
    reads=("algorithm.noise_augmentation_max_timestep", "algorithm.num_train_timestep"),
    task="video",
)
def augmentation_inside_the_table(run: Run) -> Iterator[Broken]:
    """Noise on the clean copy is drawn from the same table as the training noise."""
    largest, table = (
        run.video.algorithm.noise_augmentation_max_timestep,
        run.video.algorithm.num_train_timestep,
    )
    if largest > table:
        fact = f"timestep {largest} is outside the table of {table}"
        at = "algorithm.noise_augmentation_max_timestep"
        yield Broken(at=at, fact=fact, hint=f"use 0 to {table}; 0 switches it off")


@rule("C014", "warm-up-ends", reads=("training.warmup_steps", "training.max_iters"))
def warm_up_ends(run: Run) -> Iterator[Broken]:
    """A warm-up longer than the run never reaches the learning rate that was asked for."""
    warmup, steps = run.config.training.warmup_steps, run.config.training.max_iters
    if warmup > steps:
        fact = f"{warmup} warm-up steps, but the run has {steps}"
        yield Broken(at="training.warmup_steps", fact=fact, hint=f"use 0 to {steps}")


@rule(
    "C015",
    "shortest-sample",
    reads=("data.min_latent_frames", "data.allow_padding", "image_or_video_shape", "num_frame_per_block"),
    task="video",
)
def shortest_sample(run: Run) -> Iterator[Broken]:
    """The least length of a sample only matters where short samples are accepted, and is cut in blocks."""
    least, block = run.video.data.min_latent_frames, run.video.num_frame_per_block
    at = "data.min_latent_frames"
    if least and not run.video.data.allow_padding:
        fact = f"{least}, but data.allow_padding is false, so every sample has all {run.video.frames} frames"
        yield Broken(at=at, fact=fact, hint="write 0, or data.allow_padding: true")
    elif least > run.video.frames:
        fact = f"{least} latent frames is more than the {run.video.frames} of a clip"
        yield Broken(at=at, fact=fact, hint=f"use at most {run.video.frames}")
    elif least % block:
        fact = f"{least} latent frames is not a multiple of num_frame_per_block {block}"
        yield Broken(at=at, fact=fact, hint=f"use {one_of(around(least, block))}")


@rule("A304", "kernel-needs-a-gpu", reads=("parallel.attention",))
def kernel_needs_a_gpu(run: Run) -> Iterator[Broken]:
    """FlexAttention and variable-length attention have no backward on the CPU."""
    kernel = run.config.parallel.attention
    if run.check_paths and kernel in ("flex", "varlen") and not shows_gpu():
        fact = f"{kernel} runs on CUDA, and this machine shows no GPU"
        hint = (
            "write auto, which takes segments on the CPU and flex on CUDA, or run it on a machine with a GPU"
        )
        yield Broken(at="parallel.attention", fact=fact, hint=hint)
