"""The plugin: options for any number of recipes, a world size from the overrides, errors before processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenspan.testing import RankPool, Recipe, legal_world_size
from tests.guards.source import ROOT

pytest_plugins = ("pytester",)

CONFIG = """
model_kwargs: {{model_name: wan-tiny}}
sequence_parallel_size: {context}
num_frame_per_block: 2
image_or_video_shape: [1, 8, 48, 8, 8]
data: {{data_path: nowhere}}
"""
MODEL = (ROOT / "recipes" / "wan_ar" / "model" / "__init__.py").read_text()
SHOW = """
def test_show(recipe, recipe_world_size):
    config = recipe.config(world_size=recipe_world_size)
    print("SHOW", recipe.name, recipe.config_path.stem, recipe_world_size, config.training.lr)
"""


@pytest.fixture
def recipes(pytester: pytest.Pytester) -> pytest.Pytester:
    """Two recipes, `a` on one context rank and `b` on two, each with a test that shows what it was given."""
    for name, context in (("a", 1), ("b", 2)):
        root = pytester.path / "recipes" / name
        for folder in ("configs", "model", "tests"):
            (root / folder).mkdir(parents=True)
        (root / "configs" / "tiny.yaml").write_text(CONFIG.format(context=context))
        (root / "model" / "__init__.py").write_text(MODEL)
        (root / "tests" / "test_show.py").write_text(SHOW)
    return pytester


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RankPool) -> None:
        raise AssertionError("no rank should start here")

    monkeypatch.setattr(RankPool, "start", refuse)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    options = ("-p", "evenspan.pytest_plugin", "--import-mode=importlib", "-p", "no:cacheprovider", "-s")
    return pytester.runpytest_inprocess(*options, *arguments)


def test_several_recipes_in_one_run(recipes: pytest.Pytester) -> None:
    result = run(recipes, "recipes", "--config-override", "training.lr=0.5")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*SHOW a tiny 1 0.5*", "*SHOW b tiny 2 0.5*"])


def test_world_size_for_all(recipes: pytest.Pytester) -> None:
    result = run(recipes, "recipes", "--world-size", "4")
    result.stdout.fnmatch_lines(["*SHOW a tiny 4 *", "*SHOW b tiny 4 *"])


def test_impossible_world_size_names_the_smallest(recipes: pytest.Pytester) -> None:
    result = run(recipes, "recipes/b", "--world-size", "3")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*T108 --world-size 3: 3 ranks cannot run b/tiny.yaml*context 2*", "*smallest legal number is 2*"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_smoke_with_an_impossible_world_size_starts_nothing(recipes: pytest.Pytester) -> None:
    smoke = recipes.path / "recipes" / "b" / "tests" / "test_smoke.py"
    smoke.write_text("def test_smoke(smoke): pass")
    result = run(recipes, str(smoke), "--world-size", "3")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*T108*"])
    result.stdout.no_fnmatch_line("*no rank should start*")


def test_config_name(recipes: pytest.Pytester) -> None:
    (recipes.path / "recipes" / "a" / "configs" / "wide.yaml").write_text(CONFIG.format(context=4))
    result = run(recipes, "recipes", "--config-name", "wide")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*SHOW a wide 4 *", "*C031*b/configs: there is no wide.yaml*", "*tiny*"])


def test_unknown_override_is_named(recipes: pytest.Pytester) -> None:
    result = run(recipes, "recipes/a", "--config-override", "parallel.mesh.tensr=2")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*parallel.mesh.tensr*", "*parallel.mesh.tensor*"])


def test_test_outside_a_recipe(recipes: pytest.Pytester) -> None:
    result = run(recipes, str(recipes.makepyfile(SHOW)))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*C030*belongs to no recipe*"])


def test_recipe_without_a_model(recipes: pytest.Pytester) -> None:
    (recipes.path / "recipes" / "a" / "model" / "__init__.py").unlink()
    file = recipes.path / "recipes" / "a" / "tests" / "test_build.py"
    file.write_text("def test_build(structure): pass")
    result = run(recipes, str(file))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*C032*model/__init__.py*"])


STRUCTURE = "def test_recipe_checks(structure, recipe_hooks): recipe_hooks.check_structure(structure)"


@pytest.mark.parametrize(
    ("hook", "outcome", "line"),
    [
        ("def check_structure(structure): assert structure.config.frames == 8", "passed", "*1 passed*"),
        ("def check_structure(structure): assert structure.config.frames == 9", "failed", "*AssertionError*"),
        ("def check_structur(structure): pass", "errors", "*C033*nothing calls check_structur*"),
    ],
)
def test_recipe_hook(recipes: pytest.Pytester, hook: str, outcome: str, line: str) -> None:
    folder = recipes.path / "recipes" / "a" / "tests"
    (folder / "skills" / "sequence-parallel").mkdir(parents=True)
    (folder / "skills" / "sequence-parallel" / "asserts.py").write_text(hook)
    (folder / "test_structure.py").write_text(STRUCTURE)
    result = run(recipes, str(folder / "test_structure.py"))
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])


def recipe_with(root: Path, text: str, *overrides: str) -> Recipe:
    (root / "configs").mkdir()
    (root / "configs" / "tiny.yaml").write_text(text)
    return Recipe(root=root, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "smallest"),
    [
        ((), 2),
        (("parallel.mesh.shard=2",), 4),
        (("parallel.mesh.shard=1", "parallel.mesh.replicate=-1"), 2),
        (("sequence_parallel_size=4", "parallel.mesh.replicate=2"), 8),
        (("sequence_parallel_size=1",), 1),
    ],
)
def test_world_size_follows_the_overrides(tmp_path: Path, overrides: tuple[str, ...], smallest: int) -> None:
    assert legal_world_size(recipe_with(tmp_path, CONFIG.format(context=2), *overrides)) == smallest


def test_plugin_loads_no_torch() -> None:
    probe = "import sys, evenspan.pytest_plugin, evenspan.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0


def test_installed_under_the_name_that_the_suite_loads() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["pytest11"]
    assert entry == {"evenspan.pytest_plugin": "evenspan.pytest_plugin"}
    assert "-p evenspan.pytest_plugin" in project["tool"]["pytest"]["ini_options"]["addopts"]
