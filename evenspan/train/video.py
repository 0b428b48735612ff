"""The video task: flow matching under teacher forcing on clips, with generated clips to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch, VideoSample, collate
from evenspan.data.latents_dataset import LatentsDataset
from evenspan.data.video_dataset import VideoDataset
from evenspan.model.wan import CausalWan
from evenspan.topology.degrees import Degrees
from evenspan.topology.from_config import frame_layout
from evenspan.topology.layout import FrameLayout
from evenspan.topology.mesh import Topology
from evenspan.train.build import build_model, open_dataset, tokens_per_frame
from evenspan.train.clips import clip_requests, make_clip
from evenspan.train.objective import FlowObjective, build_objective


class VideoTask:
    """See `Task`."""

    unit = "frames"

    def __init__(self, config: RunConfig, degrees: Degrees) -> None:
        self.config = config
        self.degrees = degrees

    @cached_property
    def layout(self) -> FrameLayout:
        """Which context rank holds which latent frames. Raises ShapeError S201."""
        return frame_layout(self.config, tensor=self.degrees.tensor)

    @cached_property
    def dataset(self) -> VideoDataset | LatentsDataset:
        """The clips. Raises DataError naming every file that does not fit."""
        return open_dataset(self.config)

    @property
    def tokens_per_sample(self) -> int:
        """Latent tokens of a clip; clean and noisy copies count once."""
        return self.layout.frames * tokens_per_frame(self.config)

    def collate(self, samples: Sequence[VideoSample]) -> VideoBatch:
        """The clips as one batch. Raises DataError D701."""
        return collate(samples)

    def build_model(self, topology: Topology) -> CausalWan:
        """This rank's part of a CausalWan."""
        return build_model(self.config, topology)

    def build_objective(self, topology: Topology) -> FlowObjective:
        """Flow matching; the same on every rank."""
        del topology
        return build_objective(self.config, self.layout, seed=self.config.logging.seed)

    def local_shape(self, topology: Topology) -> list[int]:
        """[B, F local, C, H, W] of the latents."""
        share = self.layout.share(topology.coordinates.context)
        return [self.config.training.batch_size, share.count, *self.config.image_or_video_shape[2:]]

    @property
    def evaluation_interval(self) -> int:
        """Steps between clips; 0 for none."""
        return self.config.evaluation.interval

    @property
    def evaluates_average(self) -> bool:
        """Whether clips come from the averaged weights."""
        return self.config.evaluation.use_ema

    def evaluate(
        self, weights: Mapping[str, Tensor], *, name: str, directory: Path, device: torch.device
    ) -> Iterator[dict[str, object]]:
        """One clip per prompt, `directory`/`name`_0.gif and so on."""
        for number, request in enumerate(clip_requests(self.config, self.dataset)):
            out = directory / f"{name}_{number}.gif"
            make_clip(weights, self.config, request, out=out, seed=self.config.logging.seed, device=device)
            yield {"prompt": request.label, "clip": out.name}
