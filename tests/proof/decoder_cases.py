"""Hugging Face's Qwen3 on packed documents as a case for proofs, and mistakes of context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from evenspan.model.decoder import build_decoder, packed_table
from evenspan.model.decoder_config import DECODER_PRESETS
from evenspan.parallel.tensor import applied_plan
from evenspan.parallel.vocab_loss import vocab_parallel_cross_entropy
from evenspan.proof.case import Case, Scored
from evenspan.topology.mesh import Topology

LENGTHS = (5, 6, 5)
TOKENS = sum(LENGTHS)
CONFIG = replace(DECODER_PRESETS["Qwen3-nano"], vocab_size=32, num_hidden_layers=2)


def build() -> nn.Module:
    """A decoder of two layers."""
    return build_decoder(CONFIG, seed=3)


def batch(number: int) -> dict[str, Any]:
    """Two samples of three documents each; the last token of a document has no label."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, TOKENS), generator=generator)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    labels[:, [sum(LENGTHS[: place + 1]) - 1 for place in range(len(LENGTHS))]] = -100
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": positions.expand(2, -1),
        "place": torch.arange(TOKENS).expand(2, -1),
        "documents": [LENGTHS, LENGTHS],
    }


def shard(whole: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """This context rank's contiguous tokens."""
    local = TOKENS // topology.degrees.context
    first = local * topology.coordinates.context
    return {
        key: value[:, first : first + local] if isinstance(value, torch.Tensor) else value
        for key, value in whole.items()
    }


def loss(model: nn.Module, share: dict[str, Any]) -> Scored:
    """Cross entropy of the labels that this rank's tokens have."""
    logits = model(
        input_ids=share["tokens"],
        position_ids=share["positions"],
        span_table=packed_table(share["documents"]),
    ).logits
    applied = applied_plan(model)
    group = None if applied is None else applied.region.group
    labels = share["labels"]
    losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), group=group)
    return Scored(
        sum=losses.sum(), count=(labels != -100).sum(), per_token=losses.detach().view(labels.shape)
    )


def change_token(share: dict[str, Any], token: int) -> dict[str, Any]:
    """The first sample with another token at a global place."""
    here = share["place"][0] == token
    tokens = share["tokens"].clone()
    tokens[0] = torch.where(here, (tokens[0] + 1) % CONFIG.vocab_size, tokens[0])
    return {**share, "tokens": tokens}


def observe(share: dict[str, Any]) -> dict[str, Tensor]:
    """Facts per token."""
    return {"positions": share["positions"], "labels": share["labels"]}


def case(**changes: Any) -> Case:
    """The decoder as a case."""
    parts: dict[str, Any] = {
        "model": build,
        "batch": batch,
        "loss": loss,
        "shard": shard,
        "observe": observe,
        "perturb": change_token,
        "tokens": TOKENS,
    }
    return Case(**{**parts, **changes})


def good() -> Case:
    """Right at every layout."""
    return case()


def labels_shifted_after_sharding() -> Case:
    """Each rank makes labels of its own tokens: the first token of the next rank is nobody's label."""

    def late(whole: dict[str, Any], topology: Topology) -> dict[str, Any]:
        share = shard(whole, topology)
        tokens = share["tokens"]
        labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), 1)
        return {**share, "labels": torch.where(share["labels"] == -100, -100, labels)}

    return case(shard=late)


def positions_from_zero() -> Case:
    """Each rank counts its positions from 0."""

    def local(whole: dict[str, Any], topology: Topology) -> dict[str, Any]:
        share = shard(whole, topology)
        count = share["tokens"].shape[1]
        return {**share, "positions": torch.arange(count).expand(2, -1)}

    return case(shard=local)


def documents_forgotten() -> Case:
    """The table of the ranks knows no documents: tokens see the document before."""

    def one_document(model: nn.Module, share: dict[str, Any]) -> Scored:
        local = share["tokens"].shape[1]
        lengths = share["documents"] if local == TOKENS else [(TOKENS,), (TOKENS,)]
        return loss(model, {**share, "documents": lengths})

    return case(loss=one_document)
