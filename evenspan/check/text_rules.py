"""Rules about text runs: lengths, the decoder's folder, documents."""

from __future__ import annotations

from collections.abc import Iterator

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.check.shape_rules import around
from evenspan.data.text_corpus import find_documents
from evenspan.errors import DataError, ModelError

LENGTH = "data.sequence_length"
PATH = "data.data_path"
FOLDER = "model_kwargs.model_path"


@rule(
    "S207",
    "context-divides-tokens",
    reads=(LENGTH, "sequence_parallel_size", "parallel.padding"),
    task="text",
)
def context_divides_tokens(run: Run) -> Iterator[Broken]:
    """Every context rank holds the same number of tokens, so no rank waits for another."""
    tokens = run.text.data.sequence_length
    if run.config.parallel.padding == "auto" or tokens % run.context == 0:
        return
    yield Broken(
        at=LENGTH,
        fact=f"{tokens} tokens are not a multiple of sequence_parallel_size {run.context}",
        hint=f"use {one_of(around(tokens, run.context))} tokens, or parallel.padding=auto, which pads",
    )


@rule("M107", "decoder-folder", reads=("model_kwargs",), task="text")
def decoder_folder(run: Run) -> Iterator[Broken]:
    """A folder that cannot be read, or holds another kind of model, is found before the model is built."""
    wrong = run.decoder
    if run.check_paths and isinstance(wrong, ModelError) and wrong.code in ("M107", "M108"):
        yield Broken(at=FOLDER, fact=wrong.fact, hint=wrong.hint, code=wrong.code)


@rule("M109", "overrides-of-a-folder", reads=("model_kwargs",), task="text")
def folder_has_its_sizes(run: Run) -> Iterator[Broken]:
    """Weights have the sizes they were saved with; an override would not fit them."""
    wrong = run.decoder
    if isinstance(wrong, ModelError) and wrong.code == "M109":
        yield Broken(at="model_kwargs.overrides", fact=wrong.fact, hint=wrong.hint)


@rule("D901", "text-path-missing", reads=(PATH,), task="text")
def documents_exist(run: Run) -> Iterator[Broken]:
    """A path that is not there is found now, not after the model was built."""
    wrong = _documents_error(run)
    if wrong is not None and wrong.code in ("D901", "D903"):
        yield Broken(at=PATH, fact=wrong.fact, hint=wrong.hint, code=wrong.code)


@rule("D902", "no-text-files", reads=(PATH, "data.pattern"), task="text")
def documents_match(run: Run) -> Iterator[Broken]:
    """A pattern that fits no file gives no document to train on."""
    wrong = _documents_error(run)
    if wrong is not None and wrong.code == "D902":
        yield Broken(at="data.pattern", fact=wrong.fact, hint=wrong.hint)


def _documents_error(run: Run) -> DataError | None:
    if not run.check_paths:
        return None
    try:
        find_documents(run.text.data.data_path, pattern=run.text.data.pattern)
    except DataError as error:
        return error
    return None
