"""What this recipe adds to the shipped tests: every block works on this rank's share of the tokens."""

from __future__ import annotations

from evenspan.testing import Smoke, assert_local_length


def check_smoke(smoke: Smoke) -> None:
    """Each block's first norm gets tokens / context, clean and noisy copies together."""
    names = [name for name in smoke.one_process.inputs if name.endswith(".norm1")]
    assert names, "no block was called"
    for name in names:
        total = smoke.one_process.inputs[name][1]
        shapes = [run.inputs[name] for run in smoke.ranks]
        assert_local_length(shapes, dim=1, total=total, degree=smoke.degrees.context, what=name)
