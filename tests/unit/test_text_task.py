"""What a text configuration becomes: layout, data, objective; and what it refuses."""

from __future__ import annotations

import pytest
import torch

from evenspan.config.text_schema import TextRunConfig
from evenspan.data.text_batch import NO_LABEL, TextBatch
from evenspan.errors import ModelError, ShapeError
from evenspan.model.decoder import build_decoder, packed_table
from evenspan.model.decoder_config import decoder_config
from evenspan.topology.degrees import Degrees
from evenspan.topology.layout import FrameRange
from evenspan.train.tasks import build_task
from evenspan.train.text import TextTask
from evenspan.train.text_objective import TextObjective

DOCUMENTS = ((5, 3, 4), (12,))


def config(*, length: int = 32, padding: str = "error", sequence_parallel: bool = False, **model: object):
    return TextRunConfig.model_validate(
        {
            "task": "text",
            "model_kwargs": {"model_name": "Qwen3-nano", "overrides": model},
            "parallel": {"padding": padding, "backend_kwargs": {"sequence_parallel": sequence_parallel}},
            "data": {"data_path": "stdlib", "pattern": "json/*.py", "sequence_length": length},
        }
    )


def degrees(**axes: int) -> Degrees:
    return Degrees(**{"replicate": 1, "shard": 1, "context": 1, "tensor": 1, **axes})


def test_the_task_is_chosen_by_the_configuration() -> None:
    assert isinstance(build_task(config(), degrees()), TextTask)


def test_samples_are_padded_to_what_the_ranks_share() -> None:
    task = TextTask(config(length=30, padding="auto", sequence_parallel=True), degrees(context=2, tensor=2))
    assert task.layout.padded_frames == 32
    assert task.tokens_per_sample == 30
    sample = task.dataset.sample(0, epoch=0, frames=task.layout.share(1))
    assert sample.labels_T[-2:].tolist() == [NO_LABEL, NO_LABEL]
    assert sample.documents[-1] == 2


def test_without_sequence_parallelism_tensor_ranks_split_no_tokens() -> None:
    assert TextTask(config(length=30), degrees(context=2, tensor=4)).layout.padded_frames == 30


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShapeError, match="S201"):
        _ = TextTask(config(length=30, sequence_parallel=True), degrees(context=2, tensor=2)).layout


def test_a_vocabulary_below_the_tokenizers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"M110.*258 ids.*256"):
        _ = TextTask(config(vocab_size=256), degrees()).dataset


def test_the_loss_is_the_sum_over_labelled_tokens() -> None:
    model = build_decoder(decoder_config("Qwen3-nano"), seed=3).double()
    tokens = torch.randint(0, 258, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in sample]) for sample in DOCUMENTS])
    labels = tokens.roll(-1, dims=1)
    labels[0, [4, 7, 11]] = NO_LABEL
    batch = TextBatch(
        tokens_BT=tokens,
        labels_BT=labels,
        positions_BT=positions,
        share=FrameRange(0, 12),
        documents=DOCUMENTS,
        sample_ids=(0, 1),
        fingerprint=b"",
        epochs=(0, 0),
    )
    objective = TextObjective(vocabulary_group=None)
    loss = objective.loss(model, batch, step=0)
    logits = model(input_ids=tokens, position_ids=positions, span_table=packed_table(DOCUMENTS)).logits
    kept = labels != NO_LABEL
    want = -logits.log_softmax(-1)[kept].gather(-1, labels[kept][:, None]).sum()
    torch.testing.assert_close(loss.sum, want, rtol=1e-12, atol=0)
    assert loss.count == objective.valid(batch).sum() == 21
