"""Clips as files people can open: GIF or MP4, written whole or not at all."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from evenspan.errors import DataError


def write_clip(path: Path | str, *, frames_THWC: np.ndarray, fps: float) -> None:
    """Write uint8 RGB frames [T, H, W, 3] to `path`; its suffix .gif or .mp4 picks the format.

    A GIF gets a palette made from all frames. Raises DataError D705 on another suffix, D706 on frames that
    are no clip or a file that cannot be written; an existing file is then unchanged.
    """
    path = Path(path)
    if path.suffix.lower() not in (".gif", ".mp4"):
        raise DataError(
            "D705", f"{path.name} is neither .gif nor .mp4", hint="name the file clip.gif or clip.mp4"
        )
    if (
        frames_THWC.dtype != np.uint8
        or frames_THWC.ndim != 4
        or 0 in frames_THWC.shape
        or frames_THWC.shape[3] != 3
    ):
        raise DataError(
            "D706",
            f"{frames_THWC.dtype} frames of shape {list(frames_THWC.shape)} are not a clip",
            hint="pass uint8 [T, H, W, 3] with at least one frame",
        )
    part = path.with_name(f".{path.stem}.part{path.suffix.lower()}")
    encode = _encode_gif if path.suffix.lower() == ".gif" else _encode_mp4
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        encode(part, frames_THWC, Fraction(str(fps)))
        part.replace(path)
    except (av.FFmpegError, OSError) as error:
        part.unlink(missing_ok=True)
        raise DataError(
            "D706", f"{path} cannot be written: {error}", hint="check the directory and the free space"
        ) from error


def _encode_mp4(path: Path, frames_THWC: np.ndarray, fps: Fraction) -> None:
    """H.264 in yuv420p, which every player opens; odd sides lose their last row or column."""
    height, width = (side // 2 * 2 or 2 for side in frames_THWC.shape[1:3])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in _even_sides(frames_THWC, height=height, width=width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def _even_sides(frames_THWC: np.ndarray, *, height: int, width: int) -> np.ndarray:
    """The frames cut to the size, or grown by repeating the edge (one-pixel clips)."""
    grow = [
        (0, 0),
        *(
            (0, max(0, want - have))
            for want, have in zip((height, width), frames_THWC.shape[1:3], strict=True)
        ),
        (0, 0),
    ]
    return np.ascontiguousarray(np.pad(frames_THWC, grow, mode="edge")[:, :height, :width])


def _encode_gif(path: Path, frames_THWC: np.ndarray, fps: Fraction) -> None:
    """An endless GIF with one palette of 256 colours."""
    height, width = frames_THWC.shape[1:3]
    pixels = [
        av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24") for frame in frames_THWC
    ]
    with av.open(str(path), "w", options={"loop": "0"}) as container:
        stream = container.add_stream("gif", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "pal8"
        for picture in _with_palette(pixels, height=height, width=width, fps=fps):
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _with_palette(
    pictures: list[av.VideoFrame], *, height: int, width: int, fps: Fraction
) -> list[av.VideoFrame]:
    """The pictures as pal8, through FFmpeg's palettegen and paletteuse."""
    graph = av.filter.Graph()
    source = graph.add_buffer(width=width, height=height, format="rgb24", time_base=1 / fps)
    split = graph.add("split")
    make, use = graph.add("palettegen"), graph.add("paletteuse")
    sink = graph.add("buffersink")
    source.link_to(split)
    split.link_to(make, 0, 0)
    split.link_to(use, 1, 0)
    make.link_to(use, 0, 1)
    use.link_to(sink)
    graph.configure()
    for number, picture in enumerate(pictures):
        picture.pts, picture.time_base = number, 1 / fps
        source.push(picture)
    source.push(None)
    done: list[av.VideoFrame] = []
    while len(done) < len(pictures):
        done.append(sink.pull())
    return done
