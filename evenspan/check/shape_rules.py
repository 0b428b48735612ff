"""Rules about the latent shape: frames, blocks, positions, patches."""

from __future__ import annotations

from collections.abc import Iterator

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.topology.degrees import divisors

SHAPE = "image_or_video_shape"
POSITIONS = 1024
PATCH = (1, 2, 2)
MOST_SHOWN = 5
FRAMES = (SHAPE, "sequence_parallel_size", "num_frame_per_block", "parallel.padding")


def around(value: int, multiple: int) -> list[int]:
    """The multiples of `multiple` next to `value`, below and above, above 0."""
    below = value // multiple * multiple
    return [size for size in (below, below + multiple) if size > 0]


@rule("S201", "frames-fill-ranks-and-blocks", reads=FRAMES, task="video")
def frames_fill_ranks_and_blocks(run: Run) -> Iterator[Broken]:
    """Every rank holds the same whole number of blocks, so no rank waits for another."""
    frames, block = run.video.frames, run.video.num_frame_per_block
    multiple = run.context * block
    if run.video.parallel.padding == "auto" or frames % multiple == 0:
        return
    keep = "; ".join(
        f"sequence_parallel_size {context} with num_frame_per_block {one_of(_blocks(run, frames // context))}"
        for context in run.legal_contexts
        if frames % context == 0
    )
    yield Broken(
        at=SHAPE,
        fact=f"{frames} latent frames are not a multiple of sequence_parallel_size {run.context} x "
        f"num_frame_per_block {block} = {multiple}",
        hint=f"use {one_of(around(frames, multiple))} frames; or keep {frames} frames and use "
        f"{keep}; or parallel.padding=auto, which pads exactly",
    )


def _blocks(run: Run, frames_local: int) -> list[int]:
    """The block lengths that divide a rank's frames: those nearest the wanted one, ascending."""
    wanted = run.video.num_frame_per_block
    return sorted(sorted(divisors(frames_local), key=lambda block: abs(block - wanted))[:MOST_SHOWN])


@rule(
    "S203",
    "positions-fit-the-table",
    reads=(*FRAMES, "model_kwargs.model_name", "evaluation.num_frames"),
    task="video",
)
def positions_fit_the_table(run: Run) -> Iterator[Broken]:
    """Rotary positions come from a table; a frame, row or column beyond its end has none."""
    limit = run.model.rope_max_seq_len if run.model else POSITIONS
    _, rows, columns = run.model.patch_size if run.model else PATCH
    config = run.video
    step = 1 if config.parallel.padding == "auto" else run.context * config.num_frame_per_block
    for at, what, count, multiple in (
        (SHAPE, "latent frames", config.frames, step),
        (SHAPE, "latent rows", -(-config.latent_height // rows), 1),
        (SHAPE, "latent columns", -(-config.latent_width // columns), 1),
        ("evaluation.num_frames", "latent frames", config.evaluation.num_frames, config.num_frame_per_block),
    ):
        if count > limit:
            fact = f"{count} positions ({what}) but the position table has {limit}"
            yield Broken(at=at, fact=fact, hint=f"use at most {limit // multiple * multiple or limit}")


@rule("S204", "patches-cover-the-frame", reads=(SHAPE, "model_kwargs.model_name"), task="video")
def patches_cover_the_frame(run: Run) -> Iterator[Broken]:
    """Patches tile a latent frame; a remainder row or column belongs to no token."""
    _, rows, columns = run.model.patch_size if run.model else PATCH
    for what, size, patch in (
        ("height", run.video.latent_height, rows),
        ("width", run.video.latent_width, columns),
    ):
        if size % patch:
            fact = f"latent {what} {size} is not a multiple of the patch size {patch}"
            yield Broken(at=SHAPE, fact=fact, hint=f"use {what} {one_of(around(size, patch))}")


@rule("S205", "one-batch-size", reads=(SHAPE, "training.batch_size"), task="video")
def one_batch_size(run: Run) -> Iterator[Broken]:
    """The shape's first number and the batch size are the same quantity; a difference hides a mistake."""
    batch, stated = run.video.training.batch_size, run.video.image_or_video_shape[0]
    if batch != stated:
        fact = f"batch {stated} in the shape, but training.batch_size is {batch}"
        hint = f"write {[batch, *run.video.image_or_video_shape[1:]]} or training.batch_size={stated}"
        yield Broken(at=SHAPE, fact=fact, hint=hint)
