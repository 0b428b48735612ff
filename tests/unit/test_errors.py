"""Errors say a code, the fact, a way out; every code has a page and a test, and every page a use."""

from __future__ import annotations

import inspect

import pytest

from evenspan import errors
from evenspan.errors import ConfigError, EvenspanError, Finding, TopologyError, nearest
from evenspan.train.launch import lost_rank
from tests.guards.codes import (
    LETTERS,
    PAGES,
    check_letters,
    check_page,
    codes_used,
    compare_with_pages,
    page_title,
    rule_names,
)
from tests.guards.source import ROOT, package_sources, snippet

SOURCES = package_sources()
USED = {code for source in SOURCES for code, _, _ in codes_used(source)}
PAGE_FILES = sorted(PAGES.glob("*.md"))


def test_every_code_has_a_page_and_every_page_a_use():
    assert not (found := compare_with_pages(USED, {path.stem for path in PAGE_FILES})), "\n".join(found)


def test_pages_have_their_headings():
    assert not (found := [problem for path in PAGE_FILES for problem in check_page(path)]), "\n".join(found)


def test_pages_are_called_as_their_rules():
    names = dict(pair for source in SOURCES for pair in rule_names(source))
    titles = {path.stem: page_title(path) for path in PAGE_FILES if path.stem in names}
    assert titles == {code: name for code, name in names.items() if code in titles}


def test_codes_have_their_class():
    assert not (found := [problem for source in SOURCES for problem in check_letters(source)]), "\n".join(
        found
    )


def test_every_code_is_named_in_a_test():
    texts = [path.read_text() for folder in ("tests", "recipes") for path in (ROOT / folder).rglob("*.py")]
    untested = sorted(code for code in USED if not any(code in text for text in texts))
    assert not untested, f"no test names {', '.join(untested)}"


def test_letters_name_every_class():
    classes = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    classes = {name for name in classes if issubclass(vars(errors)[name], EvenspanError)}
    assert classes - {"EvenspanError", "ConfigError"} == set(LETTERS)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise ShapeError('S901', 'fact', hint='way out')", "S901"),
        ("raise errors.DataError('D901', f'{x} is missing', hint='way out')", "D901"),
        ("def f():\n    yield Finding(code='C901', at='lr', fact='', hint='')", "C901"),
        ("@rule('T901', 'name')\ndef f() -> None: ...", "T901"),
    ],
)
def test_codes_are_found(text, code):
    assert [found for found, _, _ in codes_used(snippet(text))] == [code]


@pytest.mark.parametrize("text", ["f('C90')", "f('frames S901')", "x = 'S901'", "f(x, 'lower')"])
def test_other_strings_are_not_codes(text):
    assert not list(codes_used(snippet(text)))


def test_missing_and_unused_pages_are_found():
    assert compare_with_pages({"C901"}, set()) == ["C901 has no page in evenspan/check/pages"]
    assert compare_with_pages(set(), {"C901"}) == ["C901.md explains a code that nothing uses"]


def test_rule_and_page_names_are_read(tmp_path):
    (tmp_path / "C901.md").write_text("# C901 another-rule\n")
    rules = snippet("@rule('C901', 'a-rule', reads=())\ndef f() -> None: ...\nrule('C902')")
    assert list(rule_names(rules)) == [("C901", "a-rule")]
    assert page_title(tmp_path / "C901.md") == "another-rule"


def test_wrong_letter_is_found():
    assert check_letters(snippet("raise ShapeError('D901', 'fact', hint='way out')"))
    assert not check_letters(snippet("raise DataError('D901', 'fact', hint='way out')"))


GOOD_PAGE = """# C901 a-rule

## What it does
a
## Why it is wrong
b
## Example
c
## Use instead
d
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# C901 a-rule", "# C902 a-rule"),
        ("# C901 a-rule", "# C901"),
        ("## Example\nc\n", ""),
        ("\nc\n", "\n\n"),
    ],
)
def test_broken_page_is_found(tmp_path, before, after):
    page = tmp_path / "C901.md"
    page.write_text(GOOD_PAGE)
    assert check_page(page) == []
    page.write_text(GOOD_PAGE.replace(before, after, 1))
    assert check_page(page)


def test_error_says_code_fact_and_way_out():
    error = TopologyError("T901", "3 ranks, degree 2", hint="use 2 or 4 ranks")
    assert str(error) == "T901 3 ranks, degree 2\n     -> use 2 or 4 ranks"
    assert (error.code, error.fact, error.hint, error.exit_code) == (
        "T901",
        "3 ranks, degree 2",
        "use 2 or 4 ranks",
        2,
    )


def test_config_error_lists_every_finding():
    findings = [
        Finding(code="C901", at="lr", fact="lr=-1 is negative", hint="use lr > 0"),
        Finding(code="C902", at="frames", fact="frames=0", hint="use frames >= 1"),
    ]
    error = ConfigError(findings)
    assert error.findings == tuple(findings)
    assert error.exit_code == 2
    assert str(error).splitlines() == [
        "2 configuration errors:",
        "C901 lr: lr=-1 is negative",
        "     -> use lr > 0",
        "C902 frames: frames=0",
        "     -> use frames >= 1",
    ]
    assert str(ConfigError(findings[:1])).startswith("1 configuration error:")


def test_config_error_without_findings_is_a_bug():
    with pytest.raises(AssertionError):
        ConfigError([])


def test_nearest_names_come_best_first():
    assert nearest("frams", ["frames", "heads", "frame"])[0] == "frames"
    assert nearest("zzz", ["b", "a"]) == ["a", "b"]
    assert nearest("zzz", [f"name{number}" for number in range(9)]) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49901", True),
        ("[gloo/transport/tcp/pair.cc:553] Connection reset by peer", True),
        ("NCCL communicator: remote process exited or there was a network error", True),
        ("Timed out waiting 600000ms for recv operation to complete", False),
        ("shape mismatch", False),
    ],
)
def test_a_collective_without_its_peer_is_named(text, named):
    error = lost_rank(RuntimeError(text))
    assert (error is not None) is named
    assert error is None or error.code == "X210"
