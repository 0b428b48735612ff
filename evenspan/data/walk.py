"""The walk through a sample's videos: which source frame stands at each raw frame of a clip, and which
prompt.

A clip is made of chunks, one per block of latent frames. A chunk lies inside one video; when the rest of
a video cannot hold the next chunk, the walk goes on at the start of the next one: a new shot. The walk is
arithmetic on frame counts and rates, the same on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from evenspan.data.grid import raw_frames
from evenspan.errors import DataError

STARTS_PER_VIDEO = 51
"""Evenly spaced candidates for a random start in each video."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footage:
    """What the walk knows of one video."""

    frames: int
    fps: Fraction
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkOptions:
    """How a clip is cut out of a sample."""

    frame_per_block: int
    """Latent frames per chunk."""
    temporal: int = 1
    """Raw frames per latent frame after the first."""
    fps: float = 24.0
    """Raw frames per second of the clip."""
    random_start: bool = True
    """Draw the start per (seed, epoch, sample); otherwise the first frame of the first video."""
    allow_padding: bool = False
    """Accept samples shorter than the clip; the missing frames repeat the last one and are not valid."""
    min_latent_frames: int = 0
    """Valid latent frames that a padded clip must have."""
    uniform_prompt: bool = False
    """Stay inside one video."""
    max_chunks_per_shot: int = 0
    """Chunks taken from one video before a cut of one second; 0 for no limit."""
    scene_cut_prefix: str = "The scene transitions. "
    """Put before the prompt of the first chunk after a cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A whole clip, before any pixel is read."""

    sources: tuple[tuple[int, int], ...]
    """(video, frame of it) of every raw frame."""
    prompts: tuple[str, ...]
    """Distinct prompts in the order of their first use."""
    prompt_of_frame: tuple[int, ...]
    """Index into `prompts` of every latent frame."""
    valid_frames: int
    """Latent frames from the start that show real footage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    video: int
    start: Fraction
    raw: int
    cut: bool


def walk(
    footage: Sequence[Footage],
    *,
    frames: int,
    options: WalkOptions,
    rng: random.Random | None = None,
    name: str = "",
) -> Timeline:
    """The timeline of a clip of `frames` latent frames from sample `name`.

    `rng` draws the start when `options.random_start`. Raises DataError D301 when the sample is too short,
    D302 when its padded clip has fewer than `min_latent_frames`.
    """
    latents = [min(options.frame_per_block, frames - at) for at in range(0, frames, options.frame_per_block)]
    sizes = [raw_frames(latents[0], temporal=options.temporal), *(options.temporal * n for n in latents[1:])]
    start = _first_start(footage, sizes, options)
    if options.random_start and rng:
        start = rng.choice(_starts(tuple(footage), sizes=tuple(sizes), options=options) or (start,))
    chunks = _follow(footage, sizes=sizes, start=start, options=options)
    valid = sum(latents[: len(chunks)])
    if len(chunks) < len(sizes):
        _refuse_short(footage, chunks=chunks, sizes=sizes, valid=valid, options=options, name=name)
    return _timeline(footage, chunks=chunks, latents=latents, raw=sum(sizes), valid=valid, options=options)


def _follow(
    footage: Sequence[Footage], *, sizes: Sequence[int], start: tuple[int, int], options: WalkOptions
) -> list[_Chunk]:
    """The chunks from `start` on, as many of `sizes` as the sample holds."""
    chunks: list[_Chunk] = []
    video, at, in_shot, cut = start[0], Fraction(start[1]), 0, False
    for raw in sizes:
        if options.max_chunks_per_shot and in_shot == options.max_chunks_per_shot:
            at, in_shot, cut = at + footage[video].fps, 0, True
        while _source(at, raw - 1, footage[video], options) >= footage[video].frames:
            video, at, in_shot, cut = video + 1, Fraction(0), 0, True
            if options.uniform_prompt or video == len(footage):
                return chunks
        # The clip's own first chunk is no cut, even when videos before it were too short.
        chunks.append(_Chunk(video=video, start=at, raw=raw, cut=cut and bool(chunks)))
        at, in_shot, cut = at + raw * _rate(footage[video], options), in_shot + 1, False
    return chunks


@lru_cache(maxsize=4096)
def _starts(
    footage: tuple[Footage, ...], *, sizes: tuple[int, ...], options: WalkOptions
) -> tuple[tuple[int, int], ...]:
    """(video, frame) places from which the whole clip fits; the same in every epoch, so kept."""
    places = []
    for video, film in enumerate(footage):
        last = film.frames - 1 - _source(Fraction(0), sizes[0] - 1, film, options)
        count = min(last + 1, STARTS_PER_VIDEO)
        frames = [last * i // max(count - 1, 1) for i in range(count)]
        places += [(video, frame) for frame in frames]
    return tuple(
        place
        for place in places
        if len(_follow(footage, sizes=sizes, start=place, options=options)) == len(sizes)
    )


def _first_start(footage: Sequence[Footage], sizes: Sequence[int], options: WalkOptions) -> tuple[int, int]:
    """The first frame; with `uniform_prompt` that of the first video that holds most of the clip."""
    if not options.uniform_prompt:
        return 0, 0
    held = [
        len(_follow(footage, sizes=sizes, start=(video, 0), options=options)) for video in range(len(footage))
    ]
    return held.index(max(held)), 0


def _timeline(
    footage: Sequence[Footage],
    *,
    chunks: Sequence[_Chunk],
    latents: Sequence[int],
    raw: int,
    valid: int,
    options: WalkOptions,
) -> Timeline:
    """Sources and prompts of all frames; what the chunks do not fill repeats the last frame and caption."""
    sources = [
        (chunk.video, _source(chunk.start, i, footage[chunk.video], options))
        for chunk in chunks
        for i in range(chunk.raw)
    ]
    sources += [sources[-1]] * (raw - len(sources))
    texts = [(options.scene_cut_prefix if c.cut else "") + footage[c.video].caption for c in chunks]
    texts += [footage[chunks[-1].video].caption] * (len(latents) - len(chunks))
    prompts = tuple(dict.fromkeys(texts))
    of_frame = [prompts.index(text) for text, count in zip(texts, latents, strict=True) for _ in range(count)]
    return Timeline(
        sources=tuple(sources), prompts=prompts, prompt_of_frame=tuple(of_frame), valid_frames=valid
    )


def _refuse_short(
    footage: Sequence[Footage],
    *,
    chunks: Sequence[_Chunk],
    sizes: Sequence[int],
    valid: int,
    options: WalkOptions,
    name: str,
) -> None:
    """Raise unless padding may fill up the clip."""
    films = ", ".join(f"{film.frames} at {float(film.fps):g} fps" for film in footage)
    held = sum(chunk.raw for chunk in chunks)
    if not options.allow_padding or not chunks:
        raise DataError(
            "D301",
            f"sample {name!r} has {held} frames available at {options.fps:g} fps in chunks "
            f"(first {sizes[0]}, then {sizes[-1]}), the clip needs {sum(sizes)}; its videos have {films}",
            hint="use fewer latent frames, a smaller block, a lower data.fps, or data.allow_padding"
            if chunks
            else f"use a longer video, or a block of fewer than {options.frame_per_block} latent frames",
        )
    if valid < options.min_latent_frames:
        raise DataError(
            "D302",
            f"sample {name!r} fills {valid} latent frames, data.min_latent_frames is "
            f"{options.min_latent_frames}; its videos have {films}",
            hint="remove the sample or lower data.min_latent_frames",
        )


def _rate(film: Footage, options: WalkOptions) -> Fraction:
    """Source frames per raw frame, exactly."""
    return film.fps / Fraction(str(options.fps))


def _source(start: Fraction, i: int, film: Footage, options: WalkOptions) -> int:
    """Source frame of raw frame `i` of a chunk, rounded half up."""
    return (start + i * _rate(film, options) + Fraction(1, 2)).__floor__()
