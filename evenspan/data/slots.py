"""Which samples a rank reads, for people's own loaders: a slot from a device mesh, and an endless order.

    slots = DataSlots(mesh, dp_dims=("replicate", "shard"))
    sampler = slots.sampler(len(dataset), seed=0, batch_size=4)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)

Ranks that differ only on other dimensions than `dp_dims` (context, tensor) get the same samples; slots get
different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

from torch.utils.data import Sampler, get_worker_info

from evenspan.data.sampler import SampleRef, SampleSchedule
from evenspan.topology.data_dims import DP_DIMS, data_slot, split_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataSlots:
    """This rank's place among the ranks that read different samples. Holds numbers only; can be pickled."""

    def __init__(self, mesh: DeviceMesh, dp_dims: Sequence[str] = DP_DIMS) -> None:
        """`dp_dims` are the mesh's dimensions that multiply the batch, the outermost first.

        Raises TopologyError T121 (unknown or repeated), T122 (a dimension whose ranks share samples, such as
        context or tensor), T123 (replicate or shard left out), T101 (this rank is not in the mesh).
        """
        self.dp_dims, self.shared_dims = split_dims(mesh, dp_dims)
        self.rank, self.degree = data_slot(mesh, self.dp_dims)

    def __repr__(self) -> str:
        return f"DataSlots(rank={self.rank}, degree={self.degree}, dp_dims={self.dp_dims})"

    def samples_seen(self, batches: int, *, batch_size: int, first_sample: int = 0) -> int:
        """Samples that all slots have taken after `batches` batches each: what a checkpoint stores."""
        return first_sample + batches * batch_size * self.degree

    def visits(
        self,
        size: int,
        *,
        seed: int,
        batch_size: int = 1,
        shuffle: bool = True,
        first_sample: int = 0,
    ) -> Iterator[SampleRef]:
        """(epoch, sample id) of this slot without end, of a data set of `size` samples.

        Every epoch is a permutation of all samples by (seed, epoch); over all slots each comes once. The
        order is that of evenspan's own loader with `batch_size` samples a slot and step. `first_sample` is
        `samples_seen` of the run that is continued, also at another number of slots or another batch size.

        In a worker of a DataLoader (an IterableDataset that calls this) a worker takes every n-th batch, so
        that the loader with the same `batch_size` gives the same batches for any number of workers. Raises
        DataError D501 (no samples) and D502 (batch size below 1).
        """
        schedule = SampleSchedule(
            size=size, seed=seed, global_batch=batch_size * self.degree, shuffle=shuffle
        ).resumed(step=0, samples_seen=first_sample)
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (
            visit
            for step in count(first, stride)
            for visit in schedule.slot(step, dp_rank=self.rank, dp_degree=self.degree)
        )

    def indices(
        self,
        size: int,
        *,
        seed: int,
        batch_size: int = 1,
        shuffle: bool = True,
        first_sample: int = 0,
    ) -> Iterator[int]:
        """The sample ids of `visits`."""
        visits = self.visits(
            size, seed=seed, batch_size=batch_size, shuffle=shuffle, first_sample=first_sample
        )
        return (visit.sample_id for visit in visits)

    def sampler(
        self,
        size: int,
        *,
        seed: int,
        batch_size: int = 1,
        shuffle: bool = True,
        first_sample: int = 0,
        batches: int | None = None,
    ) -> SlotSampler:
        """A sampler for `torch.utils.data.DataLoader`; ends after `batches` batches, or never."""
        return SlotSampler(
            self,
            size=size,
            seed=seed,
            batch_size=batch_size,
            shuffle=shuffle,
            first_sample=first_sample,
            batches=batches,
        )


class SlotSampler(Sampler[int]):
    """The sample ids of one slot. Every iteration begins at `first_sample`: a resume needs no other state."""

    def __init__(
        self,
        slots: DataSlots,
        *,
        size: int,
        seed: int,
        batch_size: int,
        shuffle: bool,
        first_sample: int,
        batches: int | None,
    ) -> None:
        """See `DataSlots.visits`."""
        self._slots = slots
        self._size = size
        self._seed = seed
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._first_sample = first_sample
        self._batches = batches

    def __iter__(self) -> Iterator[int]:
        indices = self._slots.indices(
            self._size,
            seed=self._seed,
            batch_size=self._batch_size,
            shuffle=self._shuffle,
            first_sample=self._first_sample,
        )
        return indices if self._batches is None else islice(indices, self._batches * self._batch_size)
