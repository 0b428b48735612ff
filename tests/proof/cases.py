"""Cases for proofs: a toy decoder with its plan, and the mistakes that people make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenspan.parallel.tensor import applied_plan
from evenspan.parallel.vocab_loss import vocab_parallel_cross_entropy
from evenspan.proof.case import Case, Scored
from tests.distributed.toy_decoder import VOCABULARY, ToyDecoder

LENGTH = 8


def token_batch(number: int) -> dict[str, Tensor]:
    """Tokens and labels; two labels carry no loss."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    labels[0, :2] = -100
    return {"tokens": tokens, "labels": labels, "positions": torch.arange(LENGTH).expand(2, -1)}


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Scored:
    """Cross entropy of this rank's part of the vocabulary."""
    logits = model(batch["tokens"])
    applied = applied_plan(model)
    group = None if applied is None else applied.region.group
    losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), group=group)
    valid = batch["labels"] != -100
    return Scored(sum=losses.sum(), count=valid.sum(), per_token=losses.detach().view(valid.shape))


def change_token(batch: dict[str, Tensor], token: int) -> dict[str, Tensor]:
    """The first sample with another token."""
    tokens = batch["tokens"].clone()
    tokens[0, token] = (tokens[0, token] + 1) % VOCABULARY
    return {**batch, "tokens": tokens}


def observe(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Facts per token."""
    return {"positions": batch["positions"], "labels": batch["labels"]}


def build() -> nn.Module:
    """A decoder with ties, biases, q and k norms and a gain that nobody planned."""
    torch.manual_seed(1)
    return ToyDecoder(layers=2)


def case(**changes: Any) -> Case:
    """The decoder as a case."""
    parts = {
        "model": build,
        "batch": token_batch,
        "loss": token_loss,
        "observe": observe,
        "perturb": change_token,
        "tokens": LENGTH,
    }
    return Case(**{**parts, **changes})


def good() -> Case:
    """Right at every layout of the tensor axis."""
    return case()


def odd_width() -> Case:
    """A vocabulary that two ranks do not divide."""

    def odd() -> nn.Module:
        model = ToyDecoder(layers=1, tied=False)
        model.lm_head = nn.Linear(16, VOCABULARY + 1, bias=False)
        return model

    return case(model=odd)
