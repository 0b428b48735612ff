"""Slots from a mesh: one stream on ranks that share samples, others elsewhere, once per epoch, resumable."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import prod

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from evenspan.data.content import content_fingerprint
from evenspan.data.sampler import SampleSchedule
from evenspan.data.slots import DataSlots
from evenspan.errors import DataError, TopologyError
from evenspan.topology.degrees import Degrees


@dataclass(frozen=True)
class Mesh:
    """What is asked of a DeviceMesh, for one rank of it, without a process group."""

    dims: dict[str, int]
    rank: int = 0

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dims.values())

    def get_coordinate(self) -> list[int] | None:
        if self.rank >= prod(self.shape):
            return None
        return [int(place) for place in np.unravel_index(self.rank, self.shape)]


FOUR = {"replicate": 2, "shard": 3, "context": 2, "tensor": 2}


def slots_of(dims: dict[str, int], dp_dims: tuple[str, ...]) -> list[DataSlots]:
    return [DataSlots(Mesh(dims, rank), dp_dims) for rank in range(prod(dims.values()))]


def test_the_slot_is_the_place_on_the_dp_dims() -> None:
    degrees = Degrees(replicate=2, shard=3, context=2, tensor=2)
    for rank, slots in enumerate(slots_of(FOUR, ("replicate", "shard"))):
        assert (slots.rank, slots.degree) == (degrees.coordinates(rank).dp, degrees.dp)
        assert slots.shared_dims == ("context", "tensor")


def test_own_names_and_no_dp_dimension() -> None:
    assert [slots.rank for slots in slots_of({"dp": 2, "tp": 2}, ("dp",))] == [0, 0, 1, 1]
    assert {(slots.rank, slots.degree) for slots in slots_of({"tensor": 4}, ())} == {(0, 1)}
    assert "rank=1, degree=2" in repr(DataSlots(Mesh({"dp": 2}, 1), ("dp",)))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_ranks_share_or_split_every_epoch(batch_size: int) -> None:
    size = 30
    streams: dict[int, list[int]] = {}
    for slots in slots_of(FOUR, ("replicate", "shard")):
        taken = list(islice(slots.indices(size, seed=3, batch_size=batch_size), 2 * size // slots.degree))
        assert streams.setdefault(slots.rank, taken) == taken, "ranks of one slot read one stream"
    first = [sample for taken in streams.values() for sample in taken[: size // 6]]
    both = [sample for taken in streams.values() for sample in taken]
    assert sorted(both) == sorted([*range(size), *range(size)]), "two epochs, each sample once in each"
    if batch_size == 1:
        assert sorted(first) == list(range(size)), "the first epoch is whole before the second begins"


def test_the_order_is_that_of_the_own_loader() -> None:
    schedule = SampleSchedule(size=7, seed=5, global_batch=4)
    slots = DataSlots(Mesh({"shard": 2, "tensor": 2}, 2), ("shard",))
    expected = [ref for step in range(5) for ref in schedule.slot(step, dp_rank=1, dp_degree=2)]
    assert list(islice(slots.visits(7, seed=5, batch_size=2), 10)) == expected
    assert {ref.epoch for ref in expected} == {0, 1, 2}, "the epoch wraps inside a batch"


def test_a_resume_takes_up_at_other_degrees() -> None:
    size = 24
    seen: list[int] = []
    for slots in slots_of({"shard": 2}, ("shard",)):
        seen += islice(slots.indices(size, seed=1, batch_size=2), 6)
    done = slots.samples_seen(3, batch_size=2)
    assert done == 12
    for slots in slots_of({"shard": 4}, ("shard",)):
        seen += islice(slots.indices(size, seed=1, batch_size=1, first_sample=done), 3)
    assert sorted(seen) == list(range(size)), "no sample is lost or comes twice"
    assert slots.samples_seen(3, batch_size=1, first_sample=done) == size


class Stream(IterableDataset):
    def __init__(self, slots: DataSlots) -> None:
        self.slots = slots

    def __iter__(self) -> Iterator[int]:
        return islice(self.slots.indices(10, seed=2, batch_size=3), 60)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_change_nothing(workers: int) -> None:
    slots = pickle.loads(pickle.dumps(DataSlots(Mesh({"shard": 2}, 1), ("shard",))))
    expected = torch.tensor(list(islice(slots.indices(10, seed=2, batch_size=3), 12))).split(3)
    options = {"batch_size": 3, "num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "fork"}
    by_sampler = DataLoader(range(10), sampler=slots.sampler(10, seed=2, batch_size=3, batches=4), **options)
    assert torch.equal(torch.stack(list(by_sampler)), torch.stack(expected))
    streamed = list(islice(DataLoader(Stream(slots), **options), 4))
    assert torch.equal(torch.stack(streamed), torch.stack(expected))


def test_a_sampler_without_an_end_starts_over() -> None:
    sampler = DataSlots(Mesh({"shard": 1}), ("shard",)).sampler(3, seed=0, shuffle=False, first_sample=2)
    assert list(islice(sampler, 4)) == list(islice(sampler, 4)) == [2, 0, 1, 2]


@pytest.mark.parametrize(
    ("dp_dims", "code", "words"),
    [
        (("shards",), "T121", "shard"),
        (("replicate", "replicate", "shard"), "T121", "comes twice"),
        (("replicate", "shard", "tensor"), "T122", "['replicate', 'shard']"),
        (("context",), "T122", "same samples"),
        (("tp",), "T122", "same samples"),
        (("shard",), "T123", "replicate of 2 ranks"),
        ((), "T123", "['replicate', 'shard']"),
    ],
)
def test_wrong_dp_dims_are_named(dp_dims: tuple[str, ...], code: str, words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        DataSlots(Mesh(FOUR), dp_dims)
    assert caught.value.code == code
    assert words in str(caught.value)


def test_meshes_that_cannot_serve() -> None:
    with pytest.raises(TopologyError, match=r"T121.*mesh has \['shard', 'tensor'\]"):
        DataSlots(Mesh({"shard": 2, "tensor": 2}))
    with pytest.raises(TopologyError, match=r"T101.*outside the mesh"):
        DataSlots(Mesh({"shard": 2}, 5), ("shard",))
    slots = DataSlots(Mesh({"shard": 2}), ("shard",))
    with pytest.raises(DataError, match="D501"):
        slots.indices(0, seed=0)
    with pytest.raises(DataError, match="D502"):
        slots.indices(5, seed=0, batch_size=0)


def test_content_fingerprints() -> None:
    def batch(**changes: object) -> dict[str, object]:
        tokens = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        return {"tokens": tokens, "ids": [1, 2], "name": "a", "frame": np.zeros(2), **changes}

    same = content_fingerprint(batch())
    assert content_fingerprint(dict(reversed(batch().items()))) == same
    strided = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T.contiguous().T
    assert content_fingerprint(batch(tokens=strided)) == same
    others = [
        batch(tokens=batch()["tokens"].flatten()),
        batch(tokens=batch()["tokens"].float()),
        batch(ids=[2, 1]),
        batch(ids=[[1], 2]),
        batch(ids=[1, True]),
        batch(name=None),
        batch(frame=np.zeros(2, np.float32)),
        batch(more=torch.tensor(1.0)),
    ]
    assert len({same, *map(content_fingerprint, others)}) == 1 + len(others)
    with pytest.raises(DataError, match="D908"):
        content_fingerprint({"file": object()})


def test_every_place_of_a_mesh_is_a_slot_or_a_copy() -> None:
    for sizes in product([1, 2], repeat=4):
        dims = dict(zip(FOUR, sizes, strict=True))
        ranks = [slots.rank for slots in slots_of(dims, ("replicate", "shard"))]
        copies = dims["context"] * dims["tensor"]
        assert sorted(ranks) == sorted([*range(len(ranks) // copies)] * copies)
