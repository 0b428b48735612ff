"""The micro-batches of one rank, step by step, from the schedule alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from evenspan.data.sampler import SampleSchedule
from evenspan.topology.layout import FrameRange

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT")


class ShareDataset(Protocol[SampleT_co]):
    """A data set that gives any range of frames (of a text: of tokens) of a sample."""

    def __len__(self) -> int: ...

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> SampleT_co:
        """The share `frames` of one sample."""
        ...


class MicroBatchLoader(Generic[SampleT, BatchT]):
    """Batches of one dp slot and one range of frames; holds no position, so any step can be asked for.

    With `prefetch` n > 0 a background thread prepares the next n micro-batches; the batches are the same.
    """

    def __init__(
        self,
        dataset: ShareDataset[SampleT],
        *,
        collate: Callable[[Sequence[SampleT]], BatchT],
        schedule: SampleSchedule,
        frames: FrameRange,
        dp_rank: int = 0,
        dp_degree: int = 1,
        micro_batches: int = 1,
        prefetch: int = 0,
    ) -> None:
        """`frames` is this rank's share of latent frames or tokens; `collate` makes a batch of samples.

        Raises DataError D502 (uneven batch).
        """
        schedule.slot(schedule.first_step, dp_rank=dp_rank, dp_degree=dp_degree, micro_batches=micro_batches)
        self._dataset = dataset
        self._collate = collate
        self._schedule = schedule
        self._frames = frames
        self._dp_rank = dp_rank
        self._dp_degree = dp_degree
        self._micro_batches = micro_batches
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="evenspan-data") if prefetch else None
        self._pending: dict[int, Future[BatchT]] = {}

    def __enter__(self) -> MicroBatchLoader[SampleT, BatchT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background thread."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def step(self, step: int) -> Iterator[BatchT]:
        """The micro-batches of optimizer step `step`, in order."""
        for micro in range(self._micro_batches):
            yield self.batch(step, micro=micro)

    def batch(self, step: int, *, micro: int = 0) -> BatchT:
        """One micro-batch. Raises what the data set raises, also when it was prepared in the background."""
        place = step * self._micro_batches + micro
        if not self._pool:
            return self._load(place)
        # A jump to another step leaves nothing of the old places behind.
        wanted = range(place, place + self._prefetch + 1)
        self._pending = {key: future for key, future in self._pending.items() if key in wanted}
        for key in wanted:
            if key not in self._pending:
                self._pending[key] = self._pool.submit(self._load, key)
        return self._pending.pop(place).result()

    def _load(self, place: int) -> BatchT:
        step, micro = divmod(place, self._micro_batches)
        slot = self._schedule.slot(
            step,
            dp_rank=self._dp_rank,
            dp_degree=self._dp_degree,
            micro=micro,
            micro_batches=self._micro_batches,
        )
        return self._collate(
            [self._dataset.sample(ref.sample_id, epoch=ref.epoch, frames=self._frames) for ref in slot]
        )
