"""Bytes and Hugging Face tokenizers give exact ids, and a fingerprint that tells two apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenspan.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, open_tokenizer
from evenspan.errors import DataError

TEXT = "caf\u00e9 <|end|> def f(x):\n\treturn \U0001f40d"


def write_tokenizer(folder: Path, *, words: str = "hello world", end: str | None = "<|end|>") -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([words] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=end, model_max_length=4).save_pretrained(folder)
    return folder


def test_bytes_are_their_own_ids() -> None:
    tokenizer = open_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([97, tokenizer.eos_id, 98, tokenizer.pad_id]) == "ab"
    assert max(255, tokenizer.eos_id, tokenizer.pad_id) == tokenizer.vocab_size - 1


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path / "one")))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_id not in ids, "an end-of-text token written in a document does not end it"
    assert max(*ids, tokenizer.eos_id) < tokenizer.vocab_size
    assert tokenizer.pad_id == tokenizer.eos_id
    assert len(tokenizer.encode("hello world")) < 11


def test_fingerprints_tell_content_apart(tmp_path: Path) -> None:
    one = open_tokenizer(str(write_tokenizer(tmp_path / "one")))
    copy = open_tokenizer(str(write_tokenizer(tmp_path / "copy")))
    other = open_tokenizer(str(write_tokenizer(tmp_path / "other", words="other words")))
    assert one.fingerprint == copy.fingerprint
    assert len({one.fingerprint, other.fingerprint, ByteTokenizer().fingerprint}) == 3


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    for name in ("bytes", str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(DataError, match="D905") as caught:
            open_tokenizer(name)
        assert "byte" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"D905.*transformers can read"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"D905.*is a file"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    folder = write_tokenizer(tmp_path / "broken")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(DataError, match="D905"):
        open_tokenizer(str(folder))


def test_a_tokenizer_that_ends_nothing(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "endless", end=None)
    with pytest.raises(DataError, match="D906"):
        open_tokenizer(str(folder))


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(DataError, match=r"D905.*needs the transformers library"):
        open_tokenizer(str(tmp_path))
