"""The documents of a text run: a file, the files of a folder, or the running Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from evenspan.data.folder import listed_problems
from evenspan.errors import DataError, Finding

STDLIB = "stdlib"
"""The word that stands for the standard library's sources; `./stdlib` is a folder of that name."""

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders beside the library's own sources: installed packages; tests, some of them broken on purpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDocument:
    """One file of text. Attention and positions of what is made from it never reach into another."""

    name: str
    """The path below the corpus' root, with forward slashes."""
    path: Path

    def read(self) -> str:
        """The text, byte for byte, without a byte-order mark. Raises OSError and UnicodeDecodeError."""
        return self.path.read_bytes().decode("utf-8-sig")


def find_documents(data_path: str | Path, *, pattern: str = "**/*.py") -> tuple[TextDocument, ...]:
    """The documents, by name: of a folder the files that match the glob `pattern`, no hidden ones.

    A `data_path` that is a file is the only document, whatever `pattern` says; `stdlib` is the standard
    library of the running Python, without tests. No file is read. Raises DataError D901 when there is no such
    path, D902 when no file matches, D903 when a folder cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if str(data_path) == STDLIB else Path(data_path)
    if root.is_file():
        return (TextDocument(name=root.name, path=root),)
    if not root.is_dir():
        near = sorted(path.name for path in root.parent.glob("*")) if root.parent.is_dir() else []
        there = f"{root.parent} has {', '.join(near[:8])}; " if near else ""
        raise DataError(
            "D901",
            f"data.data_path {data_path} does not exist",
            hint=f"{there}write a text file, a folder of them, or stdlib",
        )
    left_out = _NOT_STDLIB if str(data_path) == STDLIB else frozenset()
    files = sorted(_files(root, left_out=left_out))
    wanted = tuple(part for part in pattern.split("/") if part != ".")
    found = [parts for parts in files if _fits(parts, wanted)]
    if not found:
        kinds = sorted({Path(parts[-1]).suffix or "no suffix" for parts in files})
        has = f"the folder has files with {', '.join(kinds[:8])}" if kinds else "the folder has no files"
        raise DataError(
            "D902",
            f"no file in {root} matches data.pattern {pattern!r}",
            hint=f"{has}: write a glob relative to the folder, for example **/*.txt",
        )
    return tuple(TextDocument(name="/".join(parts), path=root.joinpath(*parts)) for parts in found)


def read_documents(documents: Sequence[TextDocument]) -> list[str]:
    """The texts in order; files without a character but white space are left out.

    Raises DataError D903 listing every file that is not UTF-8 or cannot be read, D904 when none has text.
    """
    texts, findings = [], []
    for document in documents:
        try:
            texts.append(document.read())
        except OSError as error:
            findings.append(_unreadable(document, f"cannot be read: {error.strerror}"))
        except UnicodeDecodeError as error:
            value = error.object[error.start]
            findings.append(_unreadable(document, f"byte {error.start} is 0x{value:02x}, which is not UTF-8"))
    if findings:
        raise listed_problems(_common_root(documents), findings)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(
            "D904",
            f"{len(documents)} {'document has' if len(documents) == 1 else 'documents have'} no text",
            hint="point data.data_path at files with text",
        )
    return texts


def _files(root: Path, *, left_out: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Path below `root` of every file, as parts. Hidden and `left_out` names are not even walked into."""

    def refuse(error: OSError) -> None:
        raise DataError(
            "D903",
            f"the folder {error.filename} cannot be read: {error.strerror}",
            hint="change its permissions, or point data.data_path elsewhere",
        ) from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for name in files:
            if not name.startswith("."):
                yield (*Path(folder).relative_to(root).parts, name)


def _fits(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a path fits a glob, part by part; `**` is any number of folders."""
    if not pattern:
        return not parts
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_fits(parts[skipped:], rest) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], first) and _fits(parts[1:], rest)


def _common_root(documents: Sequence[TextDocument]) -> Path:
    return Path(os.path.commonpath([document.path.parent for document in documents]))


def _unreadable(document: TextDocument, fact: str) -> Finding:
    hint = "convert the file to UTF-8, or leave it out with data.pattern"
    return Finding(code="D903", at=str(document.path), fact=fact, hint=hint)
