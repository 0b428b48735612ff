"""What this recipe adds to the shipped tests: its tensor plan fits, and every block works on its share."""

from __future__ import annotations

from evenspan.parallel.plan import Mode, parse_plan
from evenspan.parallel.resolve import resolve_plan
from evenspan.testing import Smoke, Structure, assert_local_length

SPLIT = (Mode.COL, Mode.ROW, Mode.WIDTH_NORM)


def check_structure(structure: Structure) -> None:
    """The plan finds all it names, and leaves no matrix of a block whole, with and without its SP part."""
    for sequence_parallel in (False, True):
        plan = parse_plan(type(structure.model), sequence_parallel=sequence_parallel)
        resolved = resolve_plan(plan, structure.model, ranks=max(2, structure.degrees.tensor))
        split = {entry.path for entry in resolved.modules if entry.mode in SPLIT}
        matrices = {
            path.removesuffix(".weight")
            for path, parameter in structure.model.get_submodule("blocks").named_parameters(prefix="blocks")
            if parameter.ndim == 2
        }
        assert matrices <= split, f"no rank splits {sorted(matrices - split)}"
        assert {entry.path for entry in resolved.modules if entry.mode is Mode.SPLIT} == (
            {"patch_embedding", "modulation_entry"} if sequence_parallel else set()
        )


def check_smoke(smoke: Smoke) -> None:
    """Each block's first norm gets its share of the tokens, clean and noisy copies together.

    The context ranks share them, and with sequence parallelism on the tensor axis its ranks too.
    """
    names = [name for name in smoke.one_process.inputs if name.endswith(".norm1")]
    assert names, "no block was called"
    sequence_parallel = smoke.config.parallel.backend_kwargs.sequence_parallel
    degree = smoke.degrees.context * (smoke.degrees.tensor if sequence_parallel else 1)
    for name in names:
        total = smoke.one_process.inputs[name][1]
        shapes = [run.inputs[name] for run in smoke.ranks]
        assert_local_length(shapes, dim=1, total=total, degree=degree, what=name)
