"""Documents are found by name, read exactly, and every file that cannot be used is named."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from evenspan.data.text_corpus import find_documents, read_documents
from evenspan.errors import DataError


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for name, content in {
        "b.txt": b"two\r\nlines",
        "a/z.txt": "caf\u00e9".encode(),
        "a/empty.txt": b" \n",
        ".hidden/c.txt": b"hidden",
        "a/notes.md": b"notes",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_folder_gives_matching_files_in_order(books: Path) -> None:
    found = find_documents(books, pattern="**/*.txt")
    assert [document.name for document in found] == ["a/empty.txt", "a/z.txt", "b.txt"]
    assert read_documents(found) == ["caf\u00e9", "two\r\nlines"]


def test_a_file_is_one_document(books: Path) -> None:
    (only,) = find_documents(books / "b.txt", pattern="*.never")
    assert (only.name, only.read()) == ("b.txt", "two\r\nlines")


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfx = 1")
    assert read_documents(find_documents(tmp_path)) == ["x = 1"]


def test_stdlib_is_real_text_without_tests() -> None:
    found = find_documents("stdlib")
    names = [document.name for document in found]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    sample = [document for document in found if document.name in {"ast.py", "json/decoder.py"}]
    assert all(ast.parse(text) for text in read_documents(sample))


def test_a_missing_path_lists_its_neighbours(books: Path) -> None:
    with pytest.raises(DataError, match=r"D901.*does not exist") as caught:
        find_documents(books / "bb.txt")
    assert "b.txt" in caught.value.hint
    with pytest.raises(DataError, match="D901"):
        find_documents("no/such/folder")


@pytest.mark.parametrize("pattern", ["*.py", "", "/etc/*", "../*"])
def test_nothing_matched(books: Path, pattern: str) -> None:
    with pytest.raises(DataError, match="D902") as caught:
        find_documents(books / "a", pattern=pattern)
    assert ".md, .txt" in caught.value.hint


def test_every_unreadable_file_is_listed(books: Path) -> None:
    (books / "x.txt").write_bytes(b"ok\xe9")
    (books / "a/y.txt").write_bytes(b"\xff")
    documents = find_documents(books, pattern="**/*.txt")
    (books / "b.txt").unlink()
    with pytest.raises(DataError) as caught:
        read_documents(documents)
    assert caught.value.code == "D903"
    assert "byte 2 is 0xe9" in caught.value.fact
    for name in ("x.txt", "a/y.txt", "b.txt: cannot be read"):
        assert f"{books}/{name}" in caught.value.fact
    assert "3 problems" in caught.value.fact


def test_documents_without_text(books: Path) -> None:
    with pytest.raises(DataError, match=r"D904 1 document has no text"):
        read_documents(find_documents(books / "a/empty.txt"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.txt", ["a/b/deep.txt", "a/one.txt", "top.txt"]),
        ("*.txt", ["top.txt"]),
        ("./*.txt", ["top.txt"]),
        ("a/**/*.txt", ["a/b/deep.txt", "a/one.txt"]),
        ("*/*.txt", ["a/one.txt"]),
        ("**/b/*", ["a/b/deep.txt"]),
        ("a/[n-p]*", ["a/one.txt"]),
        ("a/one.txt", ["a/one.txt"]),
        ("**", ["a/b/deep.txt", "a/one.txt", "top.txt"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in ("a/b/deep.txt", "a/one.txt", "top.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [document.name for document in find_documents(tmp_path, pattern=pattern)] == names


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"D903.*closed cannot be read"):
        find_documents(tmp_path)
