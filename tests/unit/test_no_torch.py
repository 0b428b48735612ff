"""The check answers before torch could even be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "av", "matplotlib", "diffusers", "transformers")

PROBE = """
import sys
{statement}
loaded = [name for name in {heavy} if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import evenspan.config.load, evenspan.config.environment",
        "from evenspan.check.rules import check_file; check_file('configs/wan_ti2v_5B.py', world_size=8)",
        "from evenspan.cli.app import main; main(['check', 'configs/train_ar.yaml', '--world-size', '8'])",
        "from evenspan.cli.app import main; main(['train', '--config', 'configs/none.yaml', '--nproc', '2'])",
        "from evenspan.cli.app import main; main(['explain', 'S201'])",
    ],
)
def test_the_check_path_imports_nothing_heavy(statement: str) -> None:
    script = PROBE.format(statement=statement, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_probe_can_fail() -> None:
    script = PROBE.format(statement="import numpy", heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "AssertionError: ['numpy']" in done.stderr
