"""Text as token ids: bytes without any files, or a Hugging Face tokenizer from a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from evenspan.data.fingerprint import combined_fingerprint
from evenspan.errors import DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenArray = npt.NDArray[np.integer]

BYTE = "byte"
"""The name of the built-in tokenizer."""


class Tokenizer(Protocol):
    """What a data set needs from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1; a model's vocabulary is at least as large."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def pad_id(self) -> int:
        """The id of tokens that fill up a sequence."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """Identity of the vocabulary and the rules: two tokenizers of one fingerprint give the same ids."""
        ...

    def encode(self, text: str) -> TokenArray:
        """[T] ids of `text`, without special tokens."""
        ...

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """The text of `tokens`."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then the end of a document and padding."""

    eos_id = 256
    pad_id = 257
    vocab_size = 258
    fingerprint = combined_fingerprint(["byte tokenizer", vocab_size])

    def encode(self, text: str) -> TokenArray:
        """[T] uint16, one id per byte of the text's UTF-8."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """The text; special tokens are left out, and bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(tokens, dtype=np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the transformers library. Special tokens written out in a text are plain text to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
        """`source` names it in errors. Raises DataError D906 when no token ends a document."""
        if tokenizer.eos_token_id is None:
            raise DataError(
                "D906",
                f"the tokenizer in {source} has no end-of-text token",
                hint="write eos_token in its tokenizer_config.json, or use data.tokenizer: byte",
            )
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.fingerprint = combined_fingerprint([_rules(tokenizer), self.eos_id, self.pad_id])

    def encode(self, text: str) -> TokenArray:
        """[T] int32 ids of the text, without special tokens; of any length."""
        ids = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, truncation=False, verbose=False
        )
        return np.array(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int] | TokenArray) -> str:
        """The text; special tokens are left out."""
        ids = np.asarray(tokens, dtype=np.int64).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `byte`, or the one in the Hugging Face folder `name`; nothing is downloaded.

    Raises DataError D905 when `name` is neither, when the folder does not hold a readable tokenizer or when
    transformers is missing, D906 when the tokenizer has no end-of-text token.
    """
    if name == BYTE:
        return ByteTokenizer()
    folder = Path(name)
    if not folder.is_dir():
        near = " (did you mean byte?)" if nearest(name, [BYTE]) == [BYTE] and folder.name == name else ""
        what = "a file" if folder.is_file() else "neither a folder nor the word byte"
        raise DataError(
            "D905",
            f"data.tokenizer {name} is {what}{near}",
            hint="write byte, or the folder that holds tokenizer.json and tokenizer_config.json",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            "D905",
            f"data.tokenizer {name} needs the transformers library: {error}",
            hint="install transformers, or use data.tokenizer: byte",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library and its Rust part raise many kinds, Exception itself among them
        detail = (str(error).splitlines() or [""])[0]
        raise DataError(
            "D905",
            f"{name} holds no tokenizer that transformers can read: {type(error).__name__}: {detail}",
            hint="save one there with tokenizer.save_pretrained, or use data.tokenizer: byte",
        ) from error
    return HuggingFaceTokenizer(tokenizer, source=name)


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """What decides the ids, as text: the whole of a fast tokenizer, the vocabulary of a slow one."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
