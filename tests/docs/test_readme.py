"""The README keeps its length, its commands run, its outputs are what they print, its tree is the tree."""

from __future__ import annotations

import re

import pytest

from docs import generate
from tests.guards.readme import prepared_tree, run_block, same_output, shell_blocks, with_outputs
from tests.guards.source import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = shell_blocks(README)
TIMEOUT_S = 240.0
FILE = re.compile(r"`([\w.]+/[\w./]+\.(?:py|md|yaml))`")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return prepared_tree(tmp_path_factory.mktemp("readme"))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_commands_run(block, tree):
    if block.skip:
        pytest.skip(block.skip)
    code, output = run_block(block, tree=tree, timeout_s=TIMEOUT_S)
    assert code == block.exit_code, output
    if block.compare:
        assert same_output(block.output, output), f"run `python -m docs.generate --outputs`; now:\n{output}"


def test_every_block_says_how_it_is_run():
    assert BLOCKS
    assert [block.name for block in BLOCKS if not block.marked] == []
    assert all(block.commands for block in BLOCKS)


def test_length():
    assert len(README.splitlines()) <= 250


def test_tree_is_the_tree():
    assert generate.with_tree(README) == README, "run `python -m docs.generate`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_in_pages_exist(page):
    names = FILE.findall(page.read_text())
    missing = [
        name for name in names if not any((base / name).exists() for base in (ROOT, ROOT / "evenspan"))
    ]
    assert missing == []


def test_file_names_are_found():
    text = "`train/loop.py`, `docs/index.md` and `recipes/x/tiny.yaml`, not `config.yaml` or `video/<x>/a.py`"
    assert FILE.findall(text) == ["train/loop.py", "docs/index.md", "recipes/x/tiny.yaml"]


PAGE = """<!-- run: exit 2, output -->
```console
$ echo wrong; exit 2
old
```
"""


def test_tree_holds_the_package_and_the_data(tree):
    assert (tree / "evenspan" / "data" / "__init__.py").exists()
    assert len(list((tree / "data" / "demo").rglob("*.mp4"))) == 2
    assert not (tree / ".git").exists()


def test_runner_sees_exit_code_and_output(tmp_path):
    (tmp_path / "tree").mkdir()
    block = shell_blocks(PAGE)[0]
    assert (block.commands, block.output, block.exit_code, block.compare) == (
        ("echo wrong; exit 2",),
        "old",
        2,
        True,
    )
    code, output = run_block(block, tree=tmp_path / "tree", timeout_s=10)
    assert (code, output) == (2, "wrong\n")
    assert not same_output(block.output, output)
    filled = with_outputs(PAGE, tree=tmp_path / "tree", timeout_s=10)
    assert filled == PAGE.replace("old", "wrong")


def test_failing_command_is_seen(tmp_path):
    (tmp_path / "tree").mkdir()
    block = shell_blocks("<!-- run: -->\n```console\n$ false\n$ echo later\n```\n")[0]
    assert run_block(block, tree=tmp_path / "tree", timeout_s=10) == (1, "")


def test_unmarked_and_unknown_blocks_are_seen():
    assert not shell_blocks("```console\n$ true\n```\n")[0].marked
    with pytest.raises(AssertionError, match="unknown instruction"):
        shell_blocks("<!-- run: quickly -->\n```console\n$ true\n```\n")


def test_tree_of_another_time_is_seen():
    assert generate.with_tree(README.replace("  attention/ ", "  attentions/")) == generate.with_tree(README)
    with pytest.raises(AssertionError, match="marks its tree"):
        generate.with_tree("no marks")
