"""Error codes as the package uses them, found in the syntax trees, and the pages that explain them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.guards.source import ROOT, Source, calls

PAGES = ROOT / "evenspan" / "check" / "pages"
CODE = re.compile(r"[CTSMADKRXP]\d{3}")
HEADINGS = ("What it does", "Why it is wrong", "Example", "Use instead")

LETTERS = {
    "TopologyError": "T",
    "ShapeError": "S",
    "ModelError": "M",
    "AttentionError": "A",
    "DataError": "D",
    "CheckpointError": "K",
    "RunError": "R",
    "CommError": "X",
    "PlanError": "P",
}
"""The class a code of each letter is raised with; configuration findings carry every letter."""


def codes_used(source: Source) -> Iterator[tuple[str, str, ast.Call]]:
    """Every code handed to a call, first or as `code=`: the code, the name that is called, the call."""
    for name, node in calls(source.tree):
        values = [*node.args[:1], *(item.value for item in node.keywords if item.arg == "code")]
        for value in values:
            if (
                isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and CODE.fullmatch(value.value)
            ):
                yield value.value, name, node


def check_letters(source: Source) -> list[str]:
    """An error class is raised with codes of its own letter, so that a code tells where to look."""
    return [
        source.at(node, f"{name} is raised with {code}, not with {LETTERS[name]} and three digits")
        for code, name, node in codes_used(source)
        if name in LETTERS and code[0] != LETTERS[name]
    ]


def rule_names(source: Source) -> Iterator[tuple[str, str]]:
    """The code and the name of every configuration rule."""
    for name, node in calls(source.tree):
        match node.args:
            case [ast.Constant(value=str(code)), ast.Constant(value=str(title)), *_] if name == "rule":
                yield code, title
            case _:
                continue


def page_title(path: Path) -> str:
    """A page's first line without its code: the name of the rule."""
    return path.read_text().partition("\n")[0].removeprefix(f"# {path.stem} ")


def check_page(path: Path) -> list[str]:
    """A page is named after its code, names the rule and has the headings in their order, none empty."""
    lines = path.read_text().splitlines()
    found = []
    if not lines or not re.fullmatch(rf"# {path.stem} [a-z0-9][a-z0-9-]*", lines[0]):
        found.append(f"{path.name}: the first line is not '# {path.stem} rule-name'")
    headings = tuple(line.removeprefix("## ") for line in lines if line.startswith("## "))
    if headings != HEADINGS:
        found.append(f"{path.name}: headings are {headings}, not {HEADINGS}")
    sections = re.split(r"^## .*$", path.read_text(), flags=re.MULTILINE)[1:]
    if not all(section.strip() for section in sections):
        found.append(f"{path.name}: a section is empty")
    return found


def compare_with_pages(used: set[str], pages: set[str]) -> list[str]:
    """Codes without a page and pages without a use."""
    found = [f"{code} has no page in {PAGES.relative_to(ROOT)}" for code in sorted(used - pages)]
    return found + [f"{code}.md explains a code that nothing uses" for code in sorted(pages - used)]
