"""Text training on ranks equals one process: losses, every gradient, whole runs."""

from __future__ import annotations

import pytest

from tests.distributed import cases_text_training as cases

KV4 = {"num_key_value_heads": 4}
UNTIED = {"tie_word_embeddings": False, "attention_bias": True}
FOUR_RANKS = [
    ({"tensor": 2, "shard": 2}, {"sequence_parallel": True}),
    ({"tensor": 2, "shard": 2}, {"sequence_parallel": True, "model": UNTIED, "micro_batches": 2}),
    ({"tensor": 2, "shard": 2}, {"sequence_parallel": True, "checkpointing": "full"}),
    ({"tensor": 2, "shard": 2}, {"sequence_parallel": True, "sequence_length": 31, "padding": "auto"}),
    ({"tensor": 2, "shard": 2}, {"model": UNTIED}),
    ({"tensor": 4}, {"sequence_parallel": True, "model": KV4}),
    ({"context": 2, "shard": 2}, {}),
    ({"context": 2, "shard": 2}, {"checkpointing": "selective", "micro_batches": 2, "model": UNTIED}),
    ({"context": 2, "shard": 2}, {"sequence_length": 31, "padding": "auto"}),
    ({"context": 4}, {"sequence_length": 30, "padding": "auto"}),
    ({"context": 2, "tensor": 2}, {"sequence_parallel": True, "model": KV4}),
    ({"context": 2, "tensor": 2}, {"model": KV4}),
    ({"replicate": 2, "shard": 2}, {}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return cases.write_corpus(tmp_path_factory.mktemp("text") / "corpus")


def test_loss_and_gradients_on_four_ranks(world4, corpus):
    for rank, found in enumerate(world4.run(cases.parities, corpus, FOUR_RANKS)):
        for case, errors in zip(FOUR_RANKS, found, strict=True):
            for name, error in errors.items():
                limit = 1e-12 if name == "loss" else 1e-10
                assert error <= limit, f"rank {rank}, {case}: {name} is off by {error:.2e}"
