"""Clips from a folder of videos: each rank decodes and encodes only the latent frames of its own share."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evenspan.data.batch import VideoSample
from evenspan.data.codec import Codec
from evenspan.data.decode import Fit, VideoReader
from evenspan.data.draws import DrawKey
from evenspan.data.fingerprint import combined_fingerprint, file_fingerprint
from evenspan.data.folder import FolderIndex
from evenspan.data.text import TextEncoder
from evenspan.data.walk import Footage, Timeline, WalkOptions, walk
from evenspan.errors import DataError
from evenspan.topology.layout import FrameRange


class VideoDataset:
    """Shares of clips. A sample that fails raises; it is never replaced by another."""

    def __init__(
        self,
        index: FolderIndex,
        *,
        codec: Codec,
        latent_shape: tuple[int, int, int, int],
        text_encoder: TextEncoder,
        options: WalkOptions,
        seed: int = 0,
        fit: Fit = "crop",
        cache_bytes: int = 256 * 1024**2,
    ) -> None:
        """`latent_shape` is the global [F, C, H, W] of a clip; `cache_bytes` bounds the decoded frames kept.

        Raises DataError D704 when C is not the codec's.
        """
        frames, channels, height, width = latent_shape
        if channels != codec.channels:
            raise DataError(
                "D704",
                f"the latent shape has {channels} channels, the codec makes {codec.channels}",
                hint=f"write {codec.channels} as the channels of image_or_video_shape, or change data.codec",
            )
        self._index = index
        self._codec = codec
        self._shape = (frames, channels, height, width)
        self._text_encoder = text_encoder
        self._options = replace(options, temporal=codec.temporal)
        self._seed = seed
        self._reader = VideoReader(
            height=height * codec.spatial, width=width * codec.spatial, fit=fit, cache_bytes=cache_bytes
        )
        self._file_fingerprints: dict[Path, bytes] = {}

    def __len__(self) -> int:
        return len(self._index)

    def captions(self, sample_id: int) -> tuple[str, ...]:
        """The captions of a sample's videos in playing order."""
        return tuple(video.caption for video in self._index.samples[sample_id].videos)

    def timeline(self, sample_id: int, *, epoch: int) -> Timeline:
        """The whole clip's frames and prompts, without a pixel. Raises DataError D201, D203, D301, D302."""
        folder = self._index.samples[sample_id]
        footage = []
        for video in folder.videos:
            info = self._reader.info(video.path)
            footage.append(Footage(frames=info.frames, fps=info.fps, caption=video.caption))
        key = DrawKey(seed=self._seed, epoch=epoch, sample_id=sample_id, purpose="clip start").digest()
        rng = random.Random(int.from_bytes(key, "little"))
        return walk(footage, frames=self._shape[0], options=self._options, rng=rng, name=folder.name)

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> VideoSample:
        """The share `frames` (global latent frames, padded ones included) of one clip.

        Latents are [F local, C, H, W] fp32; padded frames are zero, invalid, and follow the last prompt.
        Raises DataError D202 when a frame of this share cannot be decoded, and what `timeline` raises.
        """
        timeline = self.timeline(sample_id, epoch=epoch)
        total = self._shape[0]
        real = frames.intersect(FrameRange(0, total))
        latents = torch.zeros(frames.count, *self._shape[1:])
        if real.count:
            rows = slice(real.start - frames.start, real.stop - frames.start)
            latents[rows] = self._codec.encode(self._raw(sample_id, timeline, frames=real), frames=real)
        at = torch.arange(frames.start, frames.stop)
        return VideoSample(
            latents_FCHW=latents,
            frames=frames,
            valid_F=at < min(timeline.valid_frames, total),
            sample_id=sample_id,
            epoch=epoch,
            text_NLE=self._text_encoder.encode(timeline.prompts),
            prompt_of_frame_F=torch.tensor(timeline.prompt_of_frame)[at.clamp(max=total - 1)],
            fingerprint=self._fingerprint(sample_id, timeline),
        )

    def _raw(self, sample_id: int, timeline: Timeline, *, frames: FrameRange) -> Tensor:
        """uint8 [T, height, width, 3] of the raw frames that the latent frames need."""
        start, stop = self._codec.raw_range(frames)
        sources = timeline.sources[start:stop]
        videos = self._index.samples[sample_id].videos
        parts = []
        for video in dict.fromkeys(video for video, _ in sources):
            wanted = [frame for source, frame in sources if source == video]
            parts.append(self._reader.read(videos[video].path, frames=wanted))
        return torch.from_numpy(np.concatenate(parts))

    def _fingerprint(self, sample_id: int, timeline: Timeline) -> bytes:
        """Identity of the whole clip: its place, its files, where it was cut, its prompts, its shape."""
        folder = self._index.samples[sample_id]
        parts: list[bytes | str | int] = [sample_id, str(self._shape)]
        for video in sorted({video for video, _ in timeline.sources}):
            path = folder.videos[video].path
            if path not in self._file_fingerprints:
                self._file_fingerprints[path] = file_fingerprint(path)
            parts += [path.relative_to(self._index.root).as_posix(), self._file_fingerprints[path]]
        parts += [str(timeline.sources), *timeline.prompts]
        return combined_fingerprint(parts)
