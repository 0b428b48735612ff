"""What a run trains on, as the loop sees it: data, a model, an objective, and perhaps something to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from evenspan.data.loader import ShareDataset
from evenspan.model.flow import LossSum
from evenspan.topology.layout import FrameLayout
from evenspan.topology.mesh import Topology

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT", bound="Batch")
BatchT_contra = TypeVar("BatchT_contra", bound="Batch", contravariant=True)


class Batch(Protocol):
    """One rank's share of a micro-batch."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples in the batch."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """Identity of the whole samples' content; equal on all ranks that hold a share of them."""
        ...

    def to(self, device: torch.device) -> Self:
        """The batch with its tensors on `device`."""
        ...


class Objective(Protocol[BatchT_contra]):
    """What is asked of the model on a batch."""

    def valid(self, batch: BatchT_contra) -> Tensor:
        """True where this rank's frames or tokens count in the loss; known before any forward."""
        ...

    def loss(self, model: nn.Module, batch: BatchT_contra, *, step: int) -> LossSum:
        """The loss summed over this rank's valid frames or tokens at optimizer step `step`, from 0."""
        ...


class Task(Protocol[SampleT, BatchT]):
    """One kind of training, made from a checked configuration; one instance serves a whole run."""

    @property
    def unit(self) -> str:
        """What sequences are counted in: frames or tokens."""
        ...

    @property
    def layout(self) -> FrameLayout:
        """Which context rank holds which units of a sample."""
        ...

    @property
    def dataset(self) -> ShareDataset[SampleT]:
        """The samples; opened on first use. Raises DataError."""
        ...

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample over all ranks, without padding."""
        ...

    def collate(self, samples: Sequence[SampleT]) -> BatchT:
        """The samples as one batch."""
        ...

    def build_model(self, topology: Topology) -> nn.Module:
        """This rank's part of a model whose initial weights are the same at any degrees."""
        ...

    def build_objective(self, topology: Topology) -> Objective[BatchT]:
        """The objective of the whole run."""
        ...

    def local_shape(self, topology: Topology) -> list[int]:
        """Shape of this rank's share of a micro-batch."""
        ...

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations; 0 for none."""
        ...

    @property
    def evaluates_average(self) -> bool:
        """Whether `evaluate` gets the averaged weights instead of the trained ones."""
        ...

    def evaluate(
        self, weights: Mapping[str, Tensor], *, name: str, directory: Path, device: torch.device
    ) -> Iterator[dict[str, object]]:
        """Make what there is to show from whole weights, on one rank: files `name`..., and their facts."""
        ...


AnyTask = Task[Any, Any]
