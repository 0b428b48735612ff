"""Reference pages equal what the code generates, so they list every field, command and rule."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pytest
import typer

from docs import generate
from tests.guards.source import ROOT

COMMAND = re.compile(r"`evenspan ([a-z]+)")


@pytest.mark.parametrize("name", [name for name in generate.PAGES if name.startswith("docs/")])
def test_page_is_up_to_date(name):
    page = ROOT / name
    assert page.exists(), "run `python -m docs.generate`"
    assert page.read_text() == generate.PAGES[name](), "run `python -m docs.generate`"


def test_every_contract_command_is_listed():
    page = generate.cli_reference()
    for command in ("train", "check", "explain", "balance", "sample", "data demo"):
        assert f"## `evenspan {command}`" in page


def test_commands_named_anywhere_exist():
    texts = [path for folder in ("evenspan", "docs", "recipes") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in [*texts, ROOT / "README.md"] if path.suffix in {".py", ".md", ".yaml"}]
    page = generate.cli_reference()
    named = {(path.name, name) for path in texts for name in COMMAND.findall(path.read_text())}
    assert sorted((file, name) for file, name in named if f"## `evenspan {name}" not in page) == []


def test_command_names_are_found():
    assert COMMAND.findall("see `evenspan check FILE` and `evenspan data demo`, not evenspan itself") == [
        "check",
        "data",
    ]


def test_config_reference_lists_nested_fields():
    page = generate.config_reference()
    for key in ("sequence_parallel_size", "parallel.mesh.shard", "parallel.backend_kwargs.fsdp2.cpu_offload"):
        assert f"| `{key}` |" in page


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (int | None, "int or null"),
        (Literal["a", "b"], "`a` or `b`"),
        (list[str], "list of str"),
        (tuple[int, int], "list of int"),
        (dict[str, int | str], "map of int or str"),
        (Annotated[float, "unit"], "float"),
    ],
)
def test_types_are_readable(annotation, text):
    assert generate.type_text(annotation) == text


def test_command_rows():
    def greet(
        ctx: typer.Context,
        name: Annotated[str, typer.Argument(help="whom")],
        times: Annotated[int, typer.Option("--times", "-n", help="how often")] = 2,
        quietly: bool = typer.Option(False, help="whisper"),
    ) -> None:
        """Greets somebody."""

    program, inner = typer.Typer(), typer.Typer()
    inner.command()(greet)
    program.add_typer(inner, name="people")
    page = generate.command_page(program)
    assert "## `evenspan people greet`\n\nGreets somebody.\n" in page
    assert "| `NAME` | required | whom |" in page
    assert "| `--times`, `-n` | `2` | how often |" in page
    assert "| `--quietly` |  | whisper |" in page
