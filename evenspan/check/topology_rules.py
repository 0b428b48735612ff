"""Rules about ranks and mesh axes."""

from __future__ import annotations

from collections.abc import Iterator

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.errors import TopologyError
from evenspan.topology.degrees import divisors
from evenspan.topology.from_config import solve_degrees

MESH = ("parallel.mesh.replicate", "parallel.mesh.shard", "parallel.mesh.tensor")


@rule("T102", "one-free-axis", reads=MESH)
def one_free_axis(run: Run) -> Iterator[Broken]:
    """A degree is a positive number; one axis may be -1 and takes what the others leave."""
    mesh = run.config.parallel.mesh
    degrees = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    for axis, degree in degrees.items():
        if degree == 0:
            hint = "write a positive number, or -1 on one axis to let the world size decide"
            yield Broken(at=f"parallel.mesh.{axis}", fact="0 is not a degree", hint=hint)
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        fact = f"{len(free)} axes are -1: {', '.join(free)}; the world size decides one"
        hint = " or ".join(f"parallel.mesh.{axis}: 1" for axis in free)
        yield Broken(at="parallel.mesh", fact=fact, hint=f"write {hint}")


@rule("T103", "degrees-fill-the-world", reads=(*MESH, "sequence_parallel_size"))
def degrees_fill_the_world(run: Run) -> Iterator[Broken]:
    """Every rank has one place in the mesh: the degrees' product is the world size."""
    if run.world_size is None or one_free_axis.findings(run):
        return
    try:
        solve_degrees(run.config, world_size=run.world_size)
    except TopologyError as error:
        legal = [size for size in divisors(run.world_size) if _fits(run, size, run.world_size)]
        mesh = run.config.parallel.mesh
        own = " x ".join(
            f"{axis} {degree}"
            for axis, degree in (
                ("replicate", mesh.replicate),
                ("shard", mesh.shard),
                ("sequence_parallel_size", run.context),
                ("tensor", mesh.tensor),
            )
            if degree not in (1, -1) or axis == "sequence_parallel_size"
        )
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        contexts = f"; with {ranks} sequence_parallel_size is {one_of(legal)}" if legal else ""
        yield Broken(
            at="sequence_parallel_size",
            fact=f"{own} does not fit a world of {ranks}",
            hint=f"{error.hint}{contexts}{'; --nproc N starts N' if run.world_size == 1 else ''}",
        )


def _fits(run: Run, context: int, world_size: int) -> bool:
    try:
        solve_degrees(run.config, world_size=world_size, context=context)
    except TopologyError:
        return False
    return run.sizes is None or run.sizes.heads % context == 0
