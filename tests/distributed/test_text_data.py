"""Text loaders on ranks: tensor ranks read alike, context ranks hold parts, dp ranks read other samples."""

from itertools import chain

import pytest

from evenspan.data.sampler import SampleSchedule
from evenspan.topology.degrees import Degrees
from tests.distributed import cases_text_data as cases

LAYOUTS = [
    {"shard": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
    {"shard": 2, "context": 2},
    {"replicate": 2, "shard": 2},
    {"context": 4},
    {"tensor": 4},
]


@pytest.fixture(scope="module")
def order():
    """Epoch and sample of the whole run, step by step."""
    size = len(cases.open_text(cases.LENGTH))
    schedule = SampleSchedule(size=size, seed=1, global_batch=cases.GLOBAL_BATCH)
    return [ref for step in range(20) for ref in schedule.at(step)]


def by_place(degrees, results):
    places = [degrees.coordinates(rank) for rank in range(4)]
    return {
        (place.dp, place.context, place.tensor): found for place, found in zip(places, results, strict=True)
    }


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
@pytest.mark.parametrize("samples_seen", [0, 2])
def test_ranks_read_their_share_of_their_samples(world4, order, sizes, samples_seen):
    degrees = Degrees(**sizes)
    found = by_place(degrees, world4.run(cases.read, sizes, samples_seen))
    whole = cases.open_text(cases.layout_of(degrees).padded_frames)
    rows = cases.GLOBAL_BATCH // cases.MICRO_BATCHES // degrees.dp
    visits = []
    for micro in range(cases.STEPS * cases.MICRO_BATCHES):
        for dp in range(degrees.dp):
            for tensor in range(1, degrees.tensor):
                for context in range(degrees.context):
                    assert found[dp, context, tensor][micro] == found[dp, context, 0][micro]
            parts = [found[dp, context, 0][micro] for context in range(degrees.context)]
            ids, epochs, documents = parts[0][:3]
            assert all(part[:3] == parts[0][:3] for part in parts)
            visits += zip(epochs, ids, strict=True)
            assert len(ids) == rows
            for row, sample in enumerate(ids):
                expected = whole[sample]
                assert documents[row] == expected.documents
                union = [list(chain(*(part[field][row] for part in parts))) for field in (3, 4, 5)]
                assert union[0] == expected.tokens_T.tolist()
                assert union[1] == expected.labels_T.tolist()
                assert union[2] == expected.positions_T.tolist()
    expected = order[samples_seen : samples_seen + cases.STEPS * cases.GLOBAL_BATCH]
    assert visits == [(ref.epoch, ref.sample_id) for ref in expected], "any degrees train on one order"
    assert len(set(visits)) == len(visits)
