"""A rank that fails under the plugin: all ranks end, the test shows the traceback of each that raised."""

from __future__ import annotations

import time

import pytest

from tests.guards.source import ROOT

pytest_plugins = ("pytester",)

TEST = """
from tests.distributed.cases_pool import raise_while_others_wait

def test_fails(recipe_ranks):
    recipe_ranks.run(raise_while_others_wait, 1)
"""


def test_failing_rank_is_shown_and_ends_the_others(pytester: pytest.Pytester) -> None:
    root = pytester.path / "recipes" / "a"
    for folder in ("configs", "tests"):
        (root / folder).mkdir(parents=True)
    tiny = (ROOT / "recipes" / "wan_ar" / "configs" / "tiny.yaml").read_text()
    (root / "configs" / "tiny.yaml").write_text(tiny)
    (root / "tests" / "test_fails.py").write_text(TEST)
    started = time.monotonic()
    result = pytester.runpytest_inprocess("-p", "evenspan.pytest_plugin", "-p", "no:cacheprovider", "recipes")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ranks failed*", "*--- rank 1*", "*Traceback*", "*rank 1 says no*"])
    assert time.monotonic() - started < 60, "the ranks should not wait for the group's timeout of 120 s"
