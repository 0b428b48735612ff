"""Exactly the wanted frames of a video file, resized, by PyAV.

A file is scanned once without decoding: its packets say how many frames there are, when each is shown and
where decoding can begin. Reading seeks to the last such place before a wanted frame and decodes forward,
so a rank pays for its own frames, and gets the same pixels as a full decode.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np

from evenspan.errors import DataError

Fit = Literal["crop", "stretch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """What the packets of a file say; no pixel is decoded for it."""

    frames: int
    fps: Fraction
    times: tuple[int, ...]
    """Presentation time of every frame, in the stream's time base, ascending."""
    keys: tuple[int, ...]
    """Frames at which decoding can begin, ascending, the first of them 0."""


class VideoReader:
    """Frames of any files at one size, with the files' scans and the latest frames kept in memory."""

    def __init__(
        self, *, height: int, width: int, fit: Fit = "crop", cache_bytes: int = 256 * 1024**2
    ) -> None:
        """Frames of `height` x `width` pixels; "crop" keeps the aspect and takes the centre."""
        self.height = height
        self.width = width
        self.fit = fit
        self._cache_frames = cache_bytes // (height * width * 3)
        self._cache: OrderedDict[tuple[Path, int], np.ndarray] = OrderedDict()
        self._infos: dict[Path, VideoInfo] = {}

    def info(self, path: Path) -> VideoInfo:
        """The scan of a file. Raises DataError D201 (unreadable) and D203 (truncated)."""
        if path not in self._infos:
            self._infos[path] = scan_video(path)
        return self._infos[path]

    def read(self, path: Path, *, frames: Sequence[int]) -> np.ndarray:
        """uint8 [T, height, width, 3] (RGB) of the frames in the order given; repeats are allowed.

        Raises DataError D202 with the path and the frame where decoding fails.
        """
        got = {frame: self._cache[path, frame] for frame in frames if (path, frame) in self._cache}
        missing = sorted(set(frames) - got.keys())
        for frame, picture in decode_frames(path, info=self.info(path), frames=missing):
            got[frame] = self._resized(picture)
        self._remember(path, got)
        if not frames:
            return np.empty((0, self.height, self.width, 3), dtype=np.uint8)
        return np.stack([got[frame] for frame in frames])

    def _resized(self, picture: av.VideoFrame) -> np.ndarray:
        """[height, width, 3]: bilinear, the whole picture or its centre."""
        height, width = self.height, self.width
        if self.fit == "crop":
            scale = max(self.height / picture.height, self.width / picture.width)
            height = max(self.height, round(picture.height * scale))
            width = max(self.width, round(picture.width * scale))
        scaled = picture.reformat(width=width, height=height, format="rgb24", interpolation="BILINEAR")
        top, left = (height - self.height) // 2, (width - self.width) // 2
        return scaled.to_ndarray()[top : top + self.height, left : left + self.width].copy()

    def _remember(self, path: Path, got: dict[int, np.ndarray]) -> None:
        for frame, pixels in got.items():
            self._cache[path, frame] = pixels
            self._cache.move_to_end((path, frame))
        while len(self._cache) > self._cache_frames:
            self._cache.popitem(last=False)


def scan_video(path: Path) -> VideoInfo:
    """Frame count, rate, times and keyframes from a file's packets. Raises DataError D201 and D203."""
    hint = "replace the file, or remove it with its caption"
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DataError("D201", f"{path} has no video stream", hint=hint)
            stream = container.streams.video[0]
            promised, rate, base = stream.frames, stream.average_rate, stream.time_base
            # The last packet of a demuxer is an empty flush; a discarded packet is cut off by an edit list.
            packets = [packet for packet in container.demux(stream) if packet.size]
            shown = [(p.pts, p.is_keyframe) for p in packets if p.pts is not None and not p.is_discard]
    except av.FFmpegError as error:
        raise DataError("D201", f"{path} cannot be read as a video: {error}", hint=hint) from error
    if not shown:
        raise DataError("D201", f"{path} has no video frames", hint=hint)
    if promised > len(packets):
        raise DataError(
            "D203", f"{path} is truncated: {len(packets)} of its {promised} frames are there", hint=hint
        )
    shown.sort()
    times = tuple(time for time, _ in shown)
    if len(shown) < len([p for p in packets if not p.is_discard]) or len(set(times)) < len(times):
        raise DataError(
            "D201", f"{path} has frames without a presentation time of their own", hint="remux it as mp4"
        )
    if not rate:
        seconds = (times[-1] - times[0]) * (base or Fraction(1))
        rate = (len(times) - 1) / seconds if seconds else Fraction(24)
    keys = sorted({0, *(index for index, (_, key) in enumerate(shown) if key)})
    return VideoInfo(frames=len(times), fps=Fraction(rate), times=times, keys=tuple(keys))


def decode_frames(
    path: Path, *, info: VideoInfo, frames: Sequence[int]
) -> Iterator[tuple[int, av.VideoFrame]]:
    """(frame, picture) of ascending distinct `frames`. Raises DataError D202 where decoding fails."""
    groups: dict[int, list[int]] = {}
    for frame in frames:
        assert 0 <= frame < info.frames, f"frame {frame} of {info.frames} in {path}"
        groups.setdefault(info.keys[bisect_right(info.keys, frame) - 1], []).append(frame)
    for key, group in groups.items():
        yield from _decode_group(path, info=info, key=key, frames=group)


def _decode_group(
    path: Path, *, info: VideoInfo, key: int, frames: Sequence[int]
) -> Iterator[tuple[int, av.VideoFrame]]:
    """(frame, picture) of ascending `frames` that are all reached from keyframe `key`."""
    found = 0
    try:
        for picture in _decode_from(path, info=info, key=key):
            if picture.pts == info.times[frames[found]]:
                yield frames[found], picture
                found += 1
            if found == len(frames):
                return
    except av.FFmpegError as error:
        raise _undecodable(path, frames[found], info, str(error)) from error
    raise _undecodable(path, frames[found], info, "the decoder skipped it")


def _decode_from(path: Path, *, info: VideoInfo, key: int) -> Iterator[av.VideoFrame]:
    """Pictures in order of presentation from keyframe `key` on, or a little before."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        # Without these two checks a damaged picture is patched up from its neighbours, and trained on.
        stream.codec_context.options = {"err_detect": "explode"}
        if key:
            container.seek(info.times[key], stream=stream, backward=True)
        for picture in container.decode(stream):
            if picture.is_corrupt:
                raise av.InvalidDataError(0, "corrupt picture", str(path))
            yield picture


def _undecodable(path: Path, frame: int, info: VideoInfo, why: str) -> DataError:
    return DataError(
        "D202",
        f"{path}: frame {frame} of {info.frames} cannot be decoded: {why}",
        hint="replace the file, or remove it with its caption",
    )
