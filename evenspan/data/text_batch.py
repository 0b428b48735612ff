"""One rank's share of a batch of packed text, and the exact split and gather of it.

Shapes: B samples, T tokens (local unless said otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenspan.data.fingerprint import combined_fingerprint
from evenspan.errors import DataError, ShapeError
from evenspan.topology.layout import FrameLayout, FrameRange

NO_LABEL = -100
"""The label of a token that no token follows in its document: the default `ignore_index` of torch."""


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """One rank's share of one sample of packed documents."""

    tokens_T: Tensor
    """int64 ids."""
    labels_T: Tensor
    """int64, the token that follows in the same document, on any rank; NO_LABEL where none does."""
    positions_T: Tensor
    """int64, from 0 at the start of each document and of the sample."""
    share: FrameRange
    """Global tokens of this share, padding included."""
    documents: tuple[int, ...]
    """Lengths of the documents (padding is the last) in the whole sample; the same on every rank."""
    sample_id: int
    epoch: int
    fingerprint: bytes
    """Identity of the whole sample's content; equal on all ranks that hold a share of it."""


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """One rank's share of a micro-batch; its context group holds the other tokens of the same samples."""

    tokens_BT: Tensor
    """int64 ids."""
    labels_BT: Tensor
    """int64, already shifted: the loss compares logits t with labels t. NO_LABEL carries no loss."""
    positions_BT: Tensor
    """int64, from 0 at the start of each document and of the sample."""
    share: FrameRange
    """Global tokens of this share, padding included."""
    documents: tuple[tuple[int, ...], ...]
    """Per sample the lengths of its documents over all context ranks; each sums to `global_tokens`."""
    sample_ids: tuple[int, ...]
    fingerprint: bytes
    """Identity of the whole samples' content; equal on every context and tensor rank."""
    epochs: tuple[int, ...]
    """Epoch of each sample; tells two visits of one sample in the same step apart."""

    @property
    def global_tokens(self) -> int:
        """Tokens of one sample over all context ranks, padding included."""
        return sum(self.documents[0])

    def to(self, device: torch.device) -> TextBatch:
        """The batch with its tensors on `device`."""
        return replace(
            self,
            tokens_BT=self.tokens_BT.to(device),
            labels_BT=self.labels_BT.to(device),
            positions_BT=self.positions_BT.to(device),
        )


def collate_text(samples: Sequence[TextSample]) -> TextBatch:
    """The samples as one batch [B, T] in the order given. Raises DataError D701 when their shares differ."""
    assert samples, "a batch holds at least one sample"
    first = samples[0]
    for sample in samples[1:]:
        if sample.share != first.share or sum(sample.documents) != sum(first.documents):
            raise DataError(
                "D701",
                f"sample {sample.sample_id} has tokens {sample.share} of {sum(sample.documents)}, "
                f"sample {first.sample_id} has {first.share} of {sum(first.documents)}",
                hint="give every sample of a batch the same length and the same range of tokens",
            )
    return TextBatch(
        tokens_BT=torch.stack([sample.tokens_T for sample in samples]),
        labels_BT=torch.stack([sample.labels_T for sample in samples]),
        positions_BT=torch.stack([sample.positions_T for sample in samples]),
        share=first.share,
        documents=tuple(sample.documents for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
        fingerprint=combined_fingerprint([sample.fingerprint for sample in samples]),
        epochs=tuple(sample.epoch for sample in samples),
    )


def split_text_batch(batch: TextBatch, *, layout: FrameLayout, context_rank: int) -> TextBatch:
    """The share of `context_rank`: [B, T] global to [B, T / P] local, both padded.

    Raises ShapeError S701 when `batch` is not the whole padded sequence of the layout.
    """
    if batch.share != FrameRange(0, layout.padded_frames) or batch.tokens_BT.shape[1] != layout.padded_frames:
        raise ShapeError(
            "S701",
            f"the batch holds tokens {batch.share.start}..{batch.share.stop} in a tensor of "
            f"{batch.tokens_BT.shape[1]} tokens, the layout splits {layout.padded_frames}",
            hint="split a whole sequence, once",
        )
    share = layout.share(context_rank)
    own = slice(share.start, share.stop)
    return replace(
        batch,
        tokens_BT=batch.tokens_BT[:, own].clone(),
        labels_BT=batch.labels_BT[:, own].clone(),
        positions_BT=batch.positions_BT[:, own].clone(),
        share=share,
    )


def gather_text_batch(shares: Sequence[TextBatch], *, layout: FrameLayout) -> TextBatch:
    """The whole padded sequence from the shares of all context ranks in order.

    The inverse of `split_text_batch`. Raises ShapeError S702 when the shares are not those of the layout.
    """
    expected = list(layout.shares)
    if [share.share for share in shares] != expected:
        raise ShapeError(
            "S702",
            f"the shares hold tokens {[(s.share.start, s.share.stop) for s in shares]}, "
            f"the layout has {[(e.start, e.stop) for e in expected]}",
            hint="pass one share per context rank, in rank order",
        )
    return replace(
        shares[0],
        tokens_BT=torch.cat([share.tokens_BT for share in shares], dim=1),
        labels_BT=torch.cat([share.labels_BT for share in shares], dim=1),
        positions_BT=torch.cat([share.positions_BT for share in shares], dim=1),
        share=FrameRange(0, layout.padded_frames),
    )
