"""Packed samples against their definition, written out token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenspan.data.text_batch import NO_LABEL, collate_text, gather_text_batch, split_text_batch
from evenspan.data.text_corpus import TextDocument, find_documents
from evenspan.data.text_dataset import PackedTextDataset
from evenspan.data.tokenizer import ByteTokenizer
from evenspan.errors import DataError, ShapeError
from evenspan.topology.layout import FrameLayout, FrameRange

END, PAD = ByteTokenizer.eos_id, ByteTokenizer.pad_id


def write(folder: Path, *texts: str) -> tuple[TextDocument, ...]:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return find_documents(folder, pattern="*.txt")


def dataset(folder: Path, *texts: str, length: int, padded: int | None = None) -> PackedTextDataset:
    return PackedTextDataset(
        write(folder, *texts), tokenizer=ByteTokenizer(), sequence_length=length, padded_length=padded
    )


def test_a_worked_example(tmp_path: Path) -> None:
    data = dataset(tmp_path, "abc", "d", "efgh", "i", length=5)  # a b c . | d . | e f g h . | i .
    assert len(data) == 2
    a, b, c, d, e, f, g, h = range(97, 105)
    one, two = data[0], data[1]
    assert one.tokens_T.tolist() == [a, b, c, END, d]
    assert one.labels_T.tolist() == [b, c, END, NO_LABEL, END], "the last label lies in the next sample"
    assert one.positions_T.tolist() == [0, 1, 2, 3, 0]
    assert one.documents == (4, 1)
    assert two.tokens_T.tolist() == [END, e, f, g, h]
    assert two.labels_T.tolist() == [NO_LABEL, f, g, h, END]
    assert two.positions_T.tolist() == [0, 0, 1, 2, 3], "a sample that begins in a document restarts there"
    assert two.documents == (1, 4)


def test_shares_and_padding(tmp_path: Path) -> None:
    data = dataset(tmp_path, "abcdefgh", length=7, padded=12)
    share = data.sample(0, epoch=2, frames=FrameRange(6, 9))
    assert share.tokens_T.tolist() == [103, PAD, PAD]
    assert share.labels_T.tolist() == [104, NO_LABEL, NO_LABEL]
    assert share.positions_T.tolist() == [6, 0, 1]
    assert share.documents == (7, 5)
    assert share.epoch == 2
    tail = data.sample(0, epoch=0, frames=FrameRange(9, 12))
    assert (tail.tokens_T.tolist(), tail.positions_T.tolist()) == ([PAD] * 3, [2, 3, 4])
    assert share.fingerprint == tail.fingerprint == data[0].fingerprint


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    texts = ["abc", "defgh", "ij"]
    data = dataset(tmp_path / "a", *texts, length=5)
    again = dataset(tmp_path / "b", *texts, length=5)
    assert [data[0].fingerprint, data[1].fingerprint] == [again[0].fingerprint, again[1].fingerprint]
    assert data.fingerprint == again.fingerprint
    assert data[0].fingerprint != data[1].fingerprint
    moved = dataset(tmp_path / "c", "abcd", "efgh", "ij", length=5)  # a border moves, the last label changes
    assert moved[0].fingerprint != data[0].fingerprint
    label = dataset(tmp_path / "d", "abc", "dxfgh", "ij", length=5)  # only the last label differs
    assert torch.equal(label[0].tokens_T, data[0].tokens_T)
    assert label[0].fingerprint != data[0].fingerprint
    assert len({data.fingerprint, moved.fingerprint, label.fingerprint}) == 3


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = TextDocument.read
    monkeypatch.setattr(TextDocument, "read", lambda self: reads.append(self.name) or read(self))
    data = dataset(tmp_path, "abc", "def", length=4)
    assert reads == []
    assert len(data) == 2
    assert [data[0].sample_id, data[1].sample_id] == [0, 1]
    assert reads == ["000.txt", "001.txt"], "every document is tokenized once"


def test_batches_split_and_gather(tmp_path: Path) -> None:
    data = dataset(tmp_path, "abcdef", "ghijkl", "mn", length=7, padded=8)
    layout = FrameLayout(frames=7, frame_per_block=1, context=2, padding=True)
    whole = collate_text([data[0], data[1]])
    assert whole.global_tokens == 8
    assert whole.documents == ((7, 1), (7, 1))
    shares = [split_text_batch(whole, layout=layout, context_rank=rank) for rank in range(2)]
    for rank, share in enumerate(shares):
        own = collate_text([data.sample(i, epoch=0, frames=layout.share(rank)) for i in (0, 1)])
        assert torch.equal(own.tokens_BT, share.tokens_BT)
        assert torch.equal(own.labels_BT, share.labels_BT)
        assert torch.equal(own.positions_BT, share.positions_BT)
        assert (own.share, own.documents, own.fingerprint) == (
            share.share,
            whole.documents,
            whole.fingerprint,
        )
    back = gather_text_batch(shares, layout=layout)
    assert torch.equal(back.tokens_BT, whole.tokens_BT)
    assert torch.equal(back.labels_BT, whole.labels_BT)
    assert back.to(torch.device("cpu")).documents == whole.documents
    with pytest.raises(ShapeError, match="S701"):
        split_text_batch(shares[0], layout=layout, context_rank=0)
    with pytest.raises(ShapeError, match="S702"):
        gather_text_batch(shares[::-1], layout=layout)
    with pytest.raises(DataError, match="D701"):
        collate_text([data[0], data.sample(1, epoch=0, frames=FrameRange(0, 4))])


def test_a_corpus_smaller_than_a_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"D907.*has 8 tokens in 2 documents") as caught:
        len(dataset(tmp_path, "abc", "def", length=9))
    assert "at most 8" in caught.value.hint
    assert len(dataset(tmp_path, length=8)) == 1
    with pytest.raises(DataError, match="D907"):
        dataset(tmp_path, length=0)
    with pytest.raises(DataError, match="D907"):
        dataset(tmp_path, length=4, padded=3)


def test_samples_end(tmp_path: Path) -> None:
    data = dataset(tmp_path, "abc", length=2)
    assert len(list(data)) == 2
    with pytest.raises(IndexError):
        data[2]
