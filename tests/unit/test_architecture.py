"""The house rules of CONTRIBUTING.md, read from syntax trees; each guard is shown violations it must find."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.guards import code, imports, names
from tests.guards.source import ROOT, module_name, package_sources, snippet, tree_sources

SOURCES = package_sources()
CHECKS = [imports.check_layers, imports.check_model_is_single_device, imports.check_torch_free, *code.CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_package(check):
    found = [violation for source in SOURCES for violation in check(source)]
    assert not found, "\n".join(found)


MODEL = "evenspan/model/example.py"
LONG_BODY = "\n".join("    x = 1" for _ in range(code.FUNCTION_LINES))
DEEP = """
def f(a):
    for x in a:
        while x:
            with x:
                try:
                    pass
                finally:
                    pass
"""
DEEP_IN_ELIF = """
def f(a):
    if a:
        pass
    elif a:
        for x in a:
            with x:
                pass
"""
VIOLATIONS = [
    (imports.check_layers, "evenspan/errors.py", "import evenspan.config"),
    (imports.check_layers, "evenspan/model/wan.py", "from evenspan.parallel.apply import parallelize"),
    (imports.check_layers, "evenspan/model/wan.py", "from evenspan.comm import exchange"),
    (imports.check_layers, "evenspan/model/wan.py", "def f():\n    from evenspan import train"),
    (imports.check_layers, "evenspan/model/wan.py", "from ..train import loop"),
    (imports.check_layers, "evenspan/model/__init__.py", "from ..cli.app import main"),
    (
        imports.check_layers,
        "evenspan/model/wan.py",
        "import importlib\nimportlib.import_module('evenspan.cli')",
    ),
    (imports.check_layers, "evenspan/train/loop.py", "from evenspan.planner.balance import report"),
    (imports.check_layers, "evenspan/train/loop.py", "from evenspan.testing import RankPool"),
    (imports.check_layers, "evenspan/train/loop.py", "import evenspan.somewhere"),
    (imports.check_layers, "evenspan/somewhere/a.py", ""),
    (imports.check_layers, "evenspan/__init__.py", "from evenspan.config.schema import RunConfig"),
    (imports.check_model_is_single_device, MODEL, "import torch.distributed as dist"),
    (imports.check_model_is_single_device, MODEL, "def f():\n    from torch import distributed"),
    (imports.check_model_is_single_device, MODEL, "from torch.distributed.tensor import DTensor"),
    (imports.check_model_is_single_device, MODEL, "import torch\nx = torch.distributed.get_rank"),
    (imports.check_torch_free, "evenspan/config/load.py", "import torch"),
    (
        imports.check_torch_free,
        "evenspan/check/shape.py",
        "try:\n    from torch import nn\nfinally:\n    pass",
    ),
    (imports.check_torch_free, "evenspan/attention/spans.py", "class A:\n    import torch.nn as nn"),
    (code.check_size, MODEL, "x = 1\n" * (code.FILE_LINES + 1)),
    (code.check_size, MODEL, f"class A:\n  def f():\n{LONG_BODY}"),
    (code.check_nesting, MODEL, DEEP),
    (code.check_nesting, MODEL, DEEP_IN_ELIF + "                while x:\n                    pass"),
    (code.check_forbidden_names, MODEL, "def f():\n    global x"),
    (code.check_forbidden_names, MODEL, "from types import MethodType"),
    (code.check_forbidden_names, MODEL, "import types\na.f = types.MethodType(f, a)"),
    (code.check_forbidden_names, MODEL, "hasattr(a, 'b')"),
    (code.check_forbidden_names, MODEL, "getattr(a, 'b', None)"),
    (code.check_keyword_passing, MODEL, "def f(**kwargs):\n    g(1, **kwargs)"),
    (code.check_excepts, MODEL, "try:\n    f()\nexcept:\n    raise"),
    (code.check_excepts, MODEL, "try:\n    f()\nexcept Exception:\n    pass"),
    (code.check_excepts, MODEL, "try:\n    f()\nexcept (OSError, BaseException) as error:\n    g(error)"),
    (code.check_output, MODEL, "print('loss')"),
    (code.check_environment, MODEL, "import os\nrank = os.environ['RANK']"),
    (code.check_environment, MODEL, "import os\nrank = os.getenv('RANK')"),
    (code.check_environment, MODEL, "from os import environ"),
    (code.check_exceptions_used, MODEL, "ValueError('wrong')"),
    (code.check_exceptions_used, MODEL, "a == b"),
    (code.check_exception_messages, MODEL, "raise ValueError('half a', f'message {x}')"),
    (code.check_exception_messages, MODEL, "raise ShapeError('S101', '{frames} frames', hint='shorten')"),
    (code.check_exception_messages, MODEL, "raise ShapeError('S101', 'frames', hint='use {self.best}')"),
    (code.check_annotations, MODEL, "def f(a: int):\n    ..."),
    (code.check_annotations, MODEL, "def f(a, *, b: int) -> int:\n    ..."),
    (code.check_annotations, MODEL, "class C:\n    def __init__(self, a) -> None:\n        ..."),
    (code.check_annotations, MODEL, "class C:\n    @staticmethod\n    def f(a) -> None:\n        ..."),
    (code.check_docstrings, MODEL, "x = 1"),
    (code.check_docstrings, MODEL, "'A.'\ndef f(a: int) -> int:\n    return a"),
    (code.check_docstrings, MODEL, "'A.'\nclass C:\n    x = 1"),
    (code.check_docstrings, MODEL, "'A.'\nclass C:\n    'B.'\n    def f(self) -> int:\n        return 1"),
    (code.check_ascii, MODEL, "x = 'caf\u00e9'"),
]


@pytest.mark.parametrize(("check", "path", "text"), VIOLATIONS)
def test_guard_finds_violation(check, path, text):
    assert check(snippet(text, path=path))


def test_every_guard_is_shown_a_violation():
    assert {check for check, _, _ in VIOLATIONS} == set(CHECKS)


ALLOWED = [
    (
        imports.check_layers,
        "evenspan/train/loop.py",
        "from evenspan.train import step\nimport evenspan.errors",
    ),
    (imports.check_layers, "evenspan/cli/app.py", "from evenspan import __version__"),
    (imports.check_layers, "evenspan/__init__.py", "from evenspan.errors import EvenspanError"),
    (imports.check_model_is_single_device, "evenspan/comm/exchange.py", "import torch.distributed"),
    (imports.check_torch_free, "evenspan/check/model.py", "def f():\n    import torch"),
    (imports.check_torch_free, "evenspan/check/model.py", "if TYPE_CHECKING:\n    import torch"),
    (code.check_nesting, MODEL, DEEP_IN_ELIF),
    (code.check_keyword_passing, MODEL, "def f(a, **_):\n    g(**a)"),
    (code.check_excepts, MODEL, "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (code.check_output, "evenspan/cli/app.py", "print('loss')"),
    (code.check_exception_messages, MODEL, "raise ShapeError('S101', f'{n} frames', hint='shorten')"),
    (code.check_annotations, MODEL, "class C:\n    def f(self, a: int) -> int:\n        return a"),
    (code.check_docstrings, MODEL, "'A.'\nclass C:\n    'B.'\n    def forward(self, x):\n        return x"),
    (code.check_docstrings, MODEL, "'A.'\ndef _f():\n    ..."),
    (code.check_docstrings, "train.py", "import evenspan"),
]


@pytest.mark.parametrize(("check", "path", "text"), ALLOWED)
def test_guard_accepts(check, path, text):
    assert check(snippet(text, path=path)) == []


def test_imported_names_exist():
    found = [violation for source in tree_sources() for violation in names.check_imported_names(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    from evenspan.train.objective import Gone", 1),
        ("def f():\n    from evenspan.gone import build", 1),
        ("def f():\n    from evenspan.gone.deeper import build", 1),
        ("from evenspan.train import gone", 1),
        ("from evenspan.train import objective, gone", 1),
        ("from evenspan import config, parallel\nfrom os import gone", 0),
    ],
)
def test_a_name_that_is_gone_is_found(text, found):
    assert len(names.check_imported_names(snippet(text))) == found


def test_torch_free_patterns_name_files():
    unmatched = [p for p in imports.TORCH_FREE if not any(fnmatch(source.path, p) for source in SOURCES)]
    assert not unmatched, "a pattern that matches no file guards nothing"


PROBE = """
import importlib, os, sys, warnings
warm, names, absent = (part.split(",") if part else [] for part in sys.argv[1:])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in warm:
        importlib.import_module(name)
before = dict(os.environ)
for name in names:
    importlib.import_module(name)
problems = [f"{name} is loaded" for name in absent if name in sys.modules]
problems += [f"environment: {key}" for key in before.keys() ^ os.environ.keys()]
problems += [f"environment: {key}" for key in before if before[key] != os.environ.get(key, before[key])]
torch = sys.modules.get("torch")
if "torch" in warm and torch.cuda.is_initialized():
    problems.append("CUDA is initialised")
if "torch" in warm and torch.distributed.is_available() and torch.distributed.is_initialized():
    problems.append("a process group exists")
sys.exit("; ".join(problems))
"""


WARM = ("torch", "numpy", "av")
"""Dependencies whose own import may write the environment; ours are imported after them."""


def import_effects(names, *, warm=(), absent=(), path=ROOT):
    """What importing the modules does besides, as text; `warm` is imported first and may have effects."""
    arguments = [",".join(part) for part in (warm, names, absent)]
    command = [sys.executable, "-W", "error", "-c", PROBE, *arguments]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).strip()


def test_import_has_no_effects():
    assert import_effects(["evenspan"], absent=["torch", "numpy", "pydantic"]) == ""


def test_launch_time_modules_do_not_load_torch():
    torch_free = [s.path for s in SOURCES if any(fnmatch(s.path, pattern) for pattern in imports.TORCH_FREE)]
    assert import_effects([module_name(path) for path in torch_free], absent=["torch"]) == ""


def test_importing_any_module_has_no_effects():
    names = [module_name(source.path) for source in SOURCES if source.path.startswith("evenspan/")]
    names = [name for name in names if not name.endswith("__main__")]
    assert import_effects(names, warm=WARM, absent=["diffusers", "transformers", "matplotlib"]) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os\nos.environ['A_NEW_NAME'] = '1'", "environment: A_NEW_NAME"),
        ("import os\nos.environ['PATH'] += ':/nowhere'", "environment: PATH"),
        ("print('hello')", "hello"),
        ("import sys\nsys.stderr.write('hello')", "hello"),
        ("import torch", "torch is loaded"),
        ("import warnings\nwarnings.warn('old')", "old"),
    ],
)
def test_import_probe_finds_effect(tmp_path: Path, text, problem):
    (tmp_path / "offender.py").write_text(text)
    (tmp_path / "torch.py").write_text("")  # stands for torch, which takes seconds to import
    assert problem in import_effects(["offender"], absent=["torch"], path=tmp_path)
