"""What ranks run for the tests of text loaders."""

from evenspan.comm.fingerprint import compare_fingerprints
from evenspan.data.loader import MicroBatchLoader
from evenspan.data.sampler import SampleSchedule
from evenspan.data.text_batch import collate_text
from evenspan.data.text_corpus import find_documents
from evenspan.data.text_dataset import PackedTextDataset
from evenspan.data.tokenizer import ByteTokenizer
from evenspan.topology.degrees import Axis, Degrees
from evenspan.topology.layout import sequence_layout
from evenspan.topology.mesh import build_topology

LENGTH = 4001
"""Odd: every layout of several ranks pads."""
STEPS, MICRO_BATCHES, GLOBAL_BATCH = 3, 2, 8


def layout_of(degrees):
    return sequence_layout(LENGTH, context=degrees.context, tensor=degrees.tensor, padding=True)


def open_text(padded):
    documents = find_documents("stdlib", pattern="json/*.py")
    return PackedTextDataset(
        documents, tokenizer=ByteTokenizer(), sequence_length=LENGTH, padded_length=padded
    )


def read(ctx, sizes, samples_seen=0):
    """Every micro-batch of this rank, as (sample ids, epochs, documents, tokens, labels, positions)."""
    degrees = Degrees(**sizes)
    topology = build_topology(degrees, device=ctx.device)
    layout, place = layout_of(degrees), topology.coordinates
    dataset = open_text(layout.padded_frames)
    schedule = SampleSchedule(size=len(dataset), seed=1, global_batch=GLOBAL_BATCH)
    groups = [topology.group(axis) for axis in (Axis.CONTEXT, Axis.TENSOR)]
    found = []
    with MicroBatchLoader(
        dataset,
        collate=collate_text,
        schedule=schedule.resumed(step=0, samples_seen=samples_seen),
        frames=layout.share(place.context),
        dp_rank=place.dp,
        dp_degree=degrees.dp,
        micro_batches=MICRO_BATCHES,
        prefetch=1,
    ) as loader:
        for step in range(STEPS):
            for batch in loader.step(step):
                compare_fingerprints(batch.fingerprint, groups=groups, sample_ids=batch.sample_ids)
                tensors = (batch.tokens_BT, batch.labels_BT, batch.positions_BT)
                found.append((batch.sample_ids, batch.epochs, batch.documents, *map(_lists, tensors)))
    return found


def _lists(x):
    return x.tolist()
