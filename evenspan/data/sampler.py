"""Which samples each step trains on: a pure function of (seed, step), independent of the layout of ranks.

The epochs are laid end to end, each a permutation of all samples; step s takes the next `global_batch` of
them. So every sample comes exactly once per epoch, nothing is dropped, and a resumed run needs one number:
samples seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from evenspan.data.draws import DrawKey
from evenspan.errors import DataError


@dataclass(frozen=True, order=True, slots=True)
class Cursor:
    """A place in the endless row of samples."""

    epoch: int
    offset: int
    """Samples of this epoch already taken."""


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One visit of one sample."""

    epoch: int
    sample_id: int


@dataclass(frozen=True, kw_only=True)
class SampleSchedule:
    """The samples of any step. Raises DataError D501 (no samples) and D502 (batch that cannot be split)."""

    size: int
    """Samples in the data set."""
    seed: int
    global_batch: int
    """Samples per optimizer step, over all dp ranks and micro-batches."""
    shuffle: bool = True
    first_step: int = 0
    first_sample: int = 0
    """Samples seen before `first_step`; lets a run go on with another batch size."""
    _orders: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(
                "D501", "the data set has no samples", hint="add samples, or correct data.data_path"
            )
        if self.global_batch < 1:
            raise DataError(
                "D502", f"the global batch is {self.global_batch}", hint="use a batch size of at least 1"
            )

    def resumed(self, *, step: int, samples_seen: int) -> SampleSchedule:
        """This schedule from `step` on, with `samples_seen` samples (of all ranks) taken before it."""
        return replace(self, first_step=step, first_sample=samples_seen, _orders={})

    def samples_seen(self, step: int) -> int:
        """Samples (of all ranks) taken before `step`: the whole state to store in a checkpoint."""
        assert step >= self.first_step, f"step {step} lies before the first, {self.first_step}"
        return self.first_sample + (step - self.first_step) * self.global_batch

    def cursor(self, step: int) -> Cursor:
        """Where `step` begins."""
        return Cursor(*divmod(self.samples_seen(step), self.size))

    def at(self, step: int) -> tuple[SampleRef, ...]:
        """All `global_batch` samples of `step`, over all ranks and micro-batches."""
        start = self.samples_seen(step)
        return tuple(self._sample(place) for place in range(start, start + self.global_batch))

    def slot(
        self, step: int, *, dp_rank: int, dp_degree: int, micro: int = 0, micro_batches: int = 1
    ) -> tuple[SampleRef, ...]:
        """The samples of one dp rank and micro-batch; ranks that differ in context or tensor share them."""
        slots = dp_degree * micro_batches
        if self.global_batch % slots:
            below, above = self.global_batch // slots * slots, -(-self.global_batch // slots) * slots
            raise DataError(
                "D502",
                f"a global batch of {self.global_batch} does not split over {dp_degree} dp ranks x "
                f"{micro_batches} micro-batches",
                hint=f"use a global batch of {' or '.join(str(size) for size in (below, above) if size)}",
            )
        assert 0 <= dp_rank < dp_degree, "dp rank out of range"
        assert 0 <= micro < micro_batches, "micro-batch out of range"
        count = self.global_batch // slots
        start = (micro * dp_degree + dp_rank) * count
        return self.at(step)[start : start + count]

    def _sample(self, place: int) -> SampleRef:
        epoch, offset = divmod(place, self.size)
        return SampleRef(epoch, self._order(epoch)[offset] if self.shuffle else offset)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            for old in [known for known in self._orders if known < epoch - 1]:
                del self._orders[old]
            generator = DrawKey(seed=self.seed, epoch=epoch, purpose="sample order").generator()
            self._orders[epoch] = torch.randperm(self.size, generator=generator).tolist()
        return self._orders[epoch]
