"""Packed text, its shares and its attention, against definitions written token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenspan.attention.dense import dense_mask
from evenspan.attention.patterns import documents
from evenspan.attention.segments import attend_segments
from evenspan.attention.spans import SpanTable
from evenspan.data.text_batch import NO_LABEL, TextBatch, collate_text, gather_text_batch
from evenspan.data.text_dataset import PackedTextDataset
from evenspan.data.tokenizer import ByteTokenizer
from evenspan.topology.layout import FrameLayout, FrameRange


@dataclass(frozen=True)
class Text:
    """A document that needs no file."""

    text: str

    def read(self) -> str:
        return self.text


@dataclass(frozen=True)
class Corpus:
    texts: tuple[str, ...]
    layout: FrameLayout

    @property
    def length(self) -> int:
        return self.layout.frames

    @property
    def dataset(self) -> PackedTextDataset:
        return PackedTextDataset(
            [Text(text) for text in self.texts],
            tokenizer=ByteTokenizer(),
            sequence_length=self.length,
            padded_length=self.layout.padded_frames,
        )

    def stream(self) -> list[tuple[int, int, int]]:
        """(document, token, label) of every token of the corpus."""
        found = []
        for number, text in enumerate(self.texts):
            tokens = [*text.encode(), ByteTokenizer.eos_id]
            found += [(number, *pair) for pair in zip(tokens, [*tokens[1:], NO_LABEL], strict=True)]
        return found


@st.composite
def corpora(draw: st.DrawFn, *, most: int = 12) -> Corpus:
    letters = st.text("ab\u00e9\U0001f40d", min_size=1, max_size=9)
    texts = draw(st.lists(letters, min_size=1, max_size=8))
    tokens = sum(len(text.encode()) + 1 for text in texts)
    length = draw(st.integers(1, min(most, tokens)))
    context = draw(st.integers(1, 4))
    multiple = draw(st.integers(1, 3))
    layout = FrameLayout(frames=length, frame_per_block=1, context=context, multiple=multiple, padding=True)
    return Corpus(tuple(texts), layout)


def definition(corpus: Corpus, sample_id: int) -> dict[str, list[int]]:
    """What a whole padded sample holds, from the stream alone."""
    own = corpus.stream()[sample_id * corpus.length : (sample_id + 1) * corpus.length]
    padding = corpus.layout.padded_frames - corpus.length
    owner = [document for document, _, _ in own] + [-1] * padding
    return {
        "tokens": [token for _, token, _ in own] + [ByteTokenizer.pad_id] * padding,
        "labels": [label for _, _, label in own] + [NO_LABEL] * padding,
        "positions": [place - owner.index(one) for place, one in enumerate(owner)],
        "owner": owner,
    }


def shares(corpus: Corpus, data: PackedTextDataset, sample_ids: list[int]) -> list[TextBatch]:
    return [
        collate_text([data.sample(sample, epoch=0, frames=share) for sample in sample_ids])
        for share in corpus.layout.shares
    ]


@settings(max_examples=200, deadline=None)
@given(corpora(), st.integers(0, 2**31))
def test_the_union_over_context_ranks_is_the_sample(corpus: Corpus, seed: int) -> None:
    data = corpus.dataset
    assert len(data) == len(corpus.stream()) // corpus.length
    ids = [seed % len(data), seed // 7 % len(data)]
    parts = shares(corpus, data, ids)
    whole = gather_text_batch(parts, layout=corpus.layout)
    for row, sample in enumerate(ids):
        expected = definition(corpus, sample)
        assert whole.tokens_BT[row].tolist() == expected["tokens"]
        assert whole.labels_BT[row].tolist() == expected["labels"]
        assert whole.positions_BT[row].tolist() == expected["positions"]
    assert len({part.fingerprint for part in parts}) == 1
    assert len({part.documents for part in parts}) == 1
    assert whole.tokens_BT.dtype == whole.labels_BT.dtype == whole.positions_BT.dtype == torch.int64
    assert whole.global_tokens == corpus.layout.padded_frames


@settings(max_examples=100, deadline=None)
@given(corpora())
def test_every_label_of_the_corpus_is_scored_once(corpus: Corpus) -> None:
    """No label is lost at a border of ranks or of samples, and none is made across documents."""
    data = corpus.dataset
    scored = [
        label
        for sample in range(len(data))
        for part in shares(corpus, data, [sample])
        for label in part.labels_BT.flatten().tolist()
        if label != NO_LABEL
    ]
    used = corpus.stream()[: len(data) * corpus.length]
    assert scored == [label for _, _, label in used if label != NO_LABEL]


@settings(max_examples=150, deadline=None)
@given(corpora(), st.integers(0, 2**31))
def test_the_lengths_are_the_block_diagonal_causal_mask(corpus: Corpus, seed: int) -> None:
    data = corpus.dataset
    sample = seed % len(data)
    owner = torch.tensor(definition(corpus, sample)["owner"])
    lengths = data.sample(sample, epoch=0, frames=FrameRange(0, 1)).documents
    expected = (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    assert min(lengths) > 0
    assert sum(lengths) == corpus.layout.padded_frames
    assert torch.equal(dense_mask(documents(lengths)), expected)


def draws(tokens: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, tokens, heads, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]


def masked_attention(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, dim=2) for x in (k_BTHD, v_BTHD))
    scores = torch.einsum("bqhd,bkhd->bhqk", q_BTHD, k) / q_BTHD.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**31))
def test_attention_equals_the_dense_mask(lengths: list[int], seed: int) -> None:
    inputs = draws(sum(lengths), seed)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    table: SpanTable = documents(lengths)
    outputs = [attend_segments(*inputs, table), masked_attention(*inputs, mask)]
    assert table.pairs == mask.sum()
    gradient = torch.randn_like(outputs[0])
    results = [(out, *torch.autograd.grad(out, inputs, gradient)) for out in outputs]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=6), st.data())
def test_documents_never_leak(lengths: list[int], data: st.DataObject) -> None:
    """A changed token leaves the outputs and gradients of all other documents bit for bit as they were."""
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:changed])
    place = start + data.draw(st.integers(0, lengths[changed] - 1))
    inputs = draws(sum(lengths), 0)
    others = [x.detach().clone().index_fill_(1, torch.tensor([place]), 9.0).requires_grad_() for x in inputs]
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[start : start + lengths[changed]] = True
    table = documents(lengths)
    results = []
    for values in (inputs, others):
        out = attend_segments(*values, table)
        results.append((out, *torch.autograd.grad(out.square().sum(), values)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:, ~inside], after[:, ~inside])
    assert not torch.equal(results[0][0][:, inside], results[1][0][:, inside])


def test_a_leak_would_be_seen() -> None:
    """The same check on one causal span over both documents, as a packing without borders would make it."""
    inputs = draws(8, 0)
    others = [x.detach().clone().index_fill_(1, torch.tensor([0]), 9.0) for x in inputs]
    leaky = documents([8])
    assert not torch.equal(attend_segments(*inputs, leaky)[:, 4:], attend_segments(*others, leaky)[:, 4:])


@pytest.mark.parametrize("context", [1, 2, 4])
def test_one_document_has_one_label_less_than_tokens(context: int) -> None:
    layout = FrameLayout(frames=8, frame_per_block=1, context=context)
    corpus = Corpus(("abcdefg",), layout)
    parts = shares(corpus, corpus.dataset, [0])
    assert sum(int((part.labels_BT != NO_LABEL).sum()) for part in parts) == 7
