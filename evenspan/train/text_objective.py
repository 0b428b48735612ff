"""The objective of one micro-batch of packed text: next-token cross entropy, as a sum and a count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenspan.data.text_batch import NO_LABEL, TextBatch
from evenspan.model.decoder import packed_table
from evenspan.model.flow import LossSum
from evenspan.parallel.vocab_loss import vocab_parallel_cross_entropy


@dataclass(frozen=True, kw_only=True)
class TextObjective:
    """Next-token prediction inside each document; labels are shifted already, over all ranks."""

    vocabulary_group: dist.ProcessGroup | None
    """The tensor ranks that each hold a part of the logits' vocabulary; None where logits are whole."""

    def valid(self, batch: TextBatch) -> Tensor:
        """[B, T] local: True where a token is followed by another one of its document."""
        return batch.labels_BT != NO_LABEL

    def loss(self, model: nn.Module, batch: TextBatch, *, step: int) -> LossSum:
        """Cross entropy summed over this rank's labelled tokens. `model` is a decoder, possibly split."""
        del step  # nothing is drawn
        logits_BTV = model(
            input_ids=batch.tokens_BT,
            position_ids=batch.positions_BT,
            use_cache=False,
            span_table=packed_table(batch.documents),
        ).logits
        losses_N = vocab_parallel_cross_entropy(
            logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), group=self.vocabulary_group
        )
        return LossSum(sum=losses_N.sum(), count=self.valid(batch).sum().to(torch.float64))
