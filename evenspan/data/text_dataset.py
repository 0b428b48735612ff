"""Documents packed end to end and cut into samples of one length, of which a rank reads any range.

Documents are tokenized once, when the first sample or the length is asked for, and kept in memory at 2 bytes
a token (4 for vocabularies above 65536).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from evenspan.data.fingerprint import combined_fingerprint
from evenspan.data.text_batch import NO_LABEL, TextSample
from evenspan.data.text_corpus import TextDocument, read_documents
from evenspan.data.tokenizer import TokenArray, Tokenizer
from evenspan.errors import DataError
from evenspan.topology.layout import FrameRange


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """Every document's tokens, one after the other; each ends with the tokenizer's end-of-text token."""

    tokens_N: TokenArray
    borders: npt.NDArray[np.int64]
    """[D + 1]: document d holds tokens borders[d] .. borders[d + 1] - 1; no document is empty."""


class PackedTextDataset:
    """Samples of `sequence_length` tokens: sample i holds tokens i * length and on of the packed documents.

    A document may reach over several samples; what is left at the end of the corpus, shorter than a sample,
    is not used. Positions restart at each document, and at 0 where a sample begins inside one.
    """

    def __init__(
        self,
        documents: Sequence[TextDocument],
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        padded_length: int | None = None,
    ) -> None:
        """`padded_length` is the sequence that the ranks share, real tokens first; default: no padding.

        Reads nothing yet. Raises DataError D907 when the lengths make no sample.
        """
        padded = sequence_length if padded_length is None else padded_length
        if sequence_length < 1 or padded < sequence_length:
            raise DataError(
                "D907",
                f"samples of data.sequence_length {sequence_length} in sequences of {padded} tokens",
                hint="use a sequence length of 1 or more, padded to at least itself",
            )
        self._documents = tuple(documents)
        self._tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.padded_length = padded

    @cached_property
    def packed(self) -> PackedTokens:
        """All tokens. Raises DataError D903 or D904 (documents), D907 (fewer tokens than one sample)."""
        tokenizer = self._tokenizer
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        parts = [
            np.append(tokenizer.encode(text), tokenizer.eos_id).astype(dtype)
            for text in read_documents(self._documents)
        ]
        borders = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        if borders[-1] < self.sequence_length:
            raise DataError(
                "D907",
                f"the corpus has {borders[-1]} tokens in {len(parts)} documents, fewer than one sample of "
                f"data.sequence_length {self.sequence_length}",
                hint=f"add text, or use a sequence length of at most {borders[-1]}",
            )
        return PackedTokens(tokens_N=np.concatenate(parts), borders=borders)

    @cached_property
    def fingerprint(self) -> bytes:
        """Identity of the corpus as it is cut here: tokens, documents, tokenizer and lengths."""
        packed = self.packed
        parts = [self._tokenizer.fingerprint, _bytes(packed.tokens_N), _bytes(packed.borders)]
        return combined_fingerprint([*parts, self.sequence_length])

    def __len__(self) -> int:
        """Whole samples in the corpus. Raises what `packed` raises."""
        return len(self.packed.tokens_N) // self.sequence_length

    def __getitem__(self, sample_id: int) -> TextSample:
        """The whole sample, padded. Raises IndexError as a sequence does."""
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        return self.sample(sample_id, epoch=0, frames=FrameRange(0, self.padded_length))

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> TextSample:
        """The share `frames` (global tokens of the sample, padded ones included) as int64 tensors [T local].

        Padded tokens are a document of their own, of the tokenizer's `pad_id`, without labels.
        """
        packed, length = self.packed, self.sequence_length
        assert 0 <= sample_id < len(self), (sample_id, len(self))
        assert 0 <= frames.start <= frames.stop <= self.padded_length, (frames, self.padded_length)
        first = sample_id * length
        real = frames.intersect(FrameRange(0, length))
        places = np.arange(first + real.start, first + real.stop)
        document = np.searchsorted(packed.borders, places, side="right") - 1
        following = np.minimum(places + 1, len(packed.tokens_N) - 1)
        last_of_document = packed.borders[document + 1] == places + 1
        padding = np.arange(frames.stop - frames.count + real.count, frames.stop) - length
        return TextSample(
            tokens_T=_int64(packed.tokens_N[places], np.full(len(padding), self._tokenizer.pad_id)),
            labels_T=_int64(
                np.where(last_of_document, NO_LABEL, packed.tokens_N[following].astype(np.int64)),
                np.full(len(padding), NO_LABEL),
            ),
            positions_T=_int64(places - np.maximum(packed.borders[document], first), padding),
            share=frames,
            documents=self._lengths(first),
            sample_id=sample_id,
            epoch=epoch,
            fingerprint=self._fingerprint(sample_id),
        )

    def _lengths(self, first: int) -> tuple[int, ...]:
        """Lengths of the documents of the sample that begins at token `first`, the padding last."""
        borders = self.packed.borders
        inner = borders[np.searchsorted(borders, first, "right") :]
        inner = inner[: np.searchsorted(inner, first + self.sequence_length, "left")]
        lengths = np.diff(inner, prepend=first, append=first + self.sequence_length).tolist()
        padding = self.padded_length - self.sequence_length
        return (*lengths, padding) if padding else tuple(lengths)

    def _fingerprint(self, sample_id: int) -> bytes:
        """Of the whole sample and the token after it (its last label): no rank's share decides it."""
        first = sample_id * self.sequence_length
        tokens = self.packed.tokens_N[first : first + self.sequence_length + 1]
        rules = self._tokenizer.fingerprint
        return combined_fingerprint([rules, sample_id, _bytes(tokens), *self._lengths(first)])


def _int64(real: npt.NDArray[np.integer], padding: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([real, padding]).astype(np.int64))


def _bytes(values: npt.NDArray[np.integer]) -> bytes:
    """The same bytes on every machine."""
    return values.astype(values.dtype.newbyteorder("<")).tobytes()
