"""The proof itself: one process here, the layout on CPU ranks, and what the comparison says."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenspan.errors import RunError
from evenspan.parallel.tensor import TensorParallel, applied_plan
from evenspan.proof.case import (
    Case,
    CaseFunction,
    Layout,
    build_case,
    load_case,
    scored,
    to_fp64,
    without_dropout,
)
from evenspan.proof.causes import likely_cause
from evenspan.proof.compare import (
    Gradient,
    compare_gradients,
    compare_lengths,
    compare_replicas,
    compare_side,
    merge_checks,
)
from evenspan.proof.measure import Measuring, Side, fingerprint
from evenspan.proof.place import place
from evenspan.proof.relations import Relation
from evenspan.proof.report import LIMITS, Check, ParameterResult, Report, Status
from evenspan.ranks import RankContext, RankFailure, RankPool
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology

NOISE = 0.05
"""Standard deviation of what is added to every weight, so that no gradient is zero by initialization."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank sends back."""

    checks: list[Check]
    parameters: list[ParameterResult]
    replicas: dict[str, tuple[tuple[int, ...], str]]
    inputs: dict[str, tuple[int, ...]]
    traffic: dict[str, tuple[int, int]]


def prove(
    case: CaseFunction | str,
    *,
    degrees: Degrees,
    sequence_parallel: bool = False,
    padding: bool = False,
    subject: str = "",
    timeout: float = 600.0,
    pool: RankPool | None = None,
) -> Report:
    """Compare a layout on gloo ranks of this machine with one process: loss, every gradient, weights.

    `case` is a function without arguments that gives a Case, defined at the top of an importable module, or
    its name as `module:function`. Call from under `if __name__ == "__main__"`: ranks import the main module.
    `pool` lends ranks that are there already; otherwise ranks are started and ended, which takes seconds.
    `timeout` (s) bounds what the ranks do. Raises RunError R201 to R203 for a case that cannot be proven, and
    what the layout itself raises.
    """
    function = load_case(case) if isinstance(case, str) else case
    layout = Layout(degrees=degrees, sequence_parallel=sequence_parallel, padding=padding)
    _check_layout(build_case(function), layout)
    ranks = pool or RankPool(degrees.world_size, warnings_as_errors=False)
    started = time.perf_counter()
    try:
        ranks.start()  # they load torch while this process computes the reference
        with tempfile.TemporaryDirectory(prefix="evenspan-proof-") as folder:
            reference = one_process(build_case(function), layout, Path(folder) / "reference.pt")
            alone = time.perf_counter()
            results = ranks.run(prove_on_rank, function, layout, Path(folder), timeout=timeout)
    except RankFailure as failure:
        if failure.named:
            raise failure.named[0] from failure
        raise
    finally:
        if pool is None:
            ranks.close()
    return assemble(
        results,
        reference,
        subject=subject or _name_of(case),
        layout=layout,
        seconds={"one process": alone - started, "ranks": time.perf_counter() - alone},
    )


def one_process(case: Case, layout: Layout, file: Path) -> Side:
    """Measure the one process and leave its weights and numbers in `file` for the ranks.

    Raises R203 when the case gives other values when it is asked again.
    """
    model = case.model().double().train()
    without_dropout(model)
    _liven(model)
    batches = [to_fp64(case.batch(number)) for number in range(layout.degrees.dp * case.micro_batches)]
    if fingerprint(batches[0]) != fingerprint(to_fp64(case.batch(0))):
        raise RunError(
            "R203",
            "batch(0) gives other values when it is called again",
            hint="draw from a generator seeded by the batch's number",
        )
    with torch.no_grad():
        first, again = (scored(case, model, batches[0]).sum.item() for _ in range(2))
    if first != again:
        raise RunError(
            "R203",
            f"the loss of batch 0 is {first!r}, then {again!r}, with the same weights",
            hint="switch off what draws random numbers in the forward, such as attention_dropout",
        )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    side = Measuring(case, model, batches, None).run()
    torch.save({"weights": weights, "side": side}, file)
    return side


def prove_on_rank(context: RankContext, function: CaseFunction, layout: Layout, folder: Path) -> RankResult:
    """Run on every rank of a pool: place the model, measure, compare."""
    # Whole tensors are read over axes in any order here; torch's advice on that is for training.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    topology = build_topology(layout.degrees, device=context.device)
    case = build_case(function)
    saved = torch.load(folder / "reference.pt", weights_only=False)
    reference: Side = saved["side"]
    model = case.model().double().train()
    without_dropout(model)
    model.load_state_dict(saved["weights"])
    (case.place or place)(model, topology, layout)
    first = topology.coordinates.dp * case.micro_batches
    batches = [to_fp64(case.batch(first + number)) for number in range(case.micro_batches)]
    side = Measuring(case, model, batches, topology).run(max_norm=reference.norm / 2)
    gradients = compare_gradients(side, reference, degrees=layout.degrees)
    applied = applied_plan(model)
    return RankResult(
        checks=compare_side(side, reference, first_batch=first),
        parameters=[_parameter(gradient, applied) for gradient in gradients],
        replicas=side.replicas,
        inputs=side.inputs,
        traffic=side.traffic,
    )


def assemble(
    results: Sequence[RankResult],
    reference: Side,
    *,
    subject: str,
    layout: Layout,
    seconds: dict[str, float],
) -> Report:
    """One report of what all ranks sent."""
    degrees = layout.degrees
    checks = merge_checks([result.checks for result in results])
    checks.append(_gradients(results[0].parameters))
    checks.append(compare_replicas([result.replicas for result in results]))
    requested = degrees.context * (degrees.tensor if layout.sequence_parallel else 1)
    checks.append(
        compare_lengths([result.inputs for result in results], reference.inputs, requested=requested)
    )
    checks.append(_traffic([result.traffic for result in results]))
    return Report(
        subject=subject,
        layout=str(layout),
        degrees={axis.value: degree for axis, degree in degrees.by_axis().items()},
        checks=tuple(checks),
        parameters=tuple(results[0].parameters),
        seconds=seconds,
    )


def _check_layout(case: Case, layout: Layout) -> None:
    """Raise R202 for a layout that the case says nothing about."""
    if layout.degrees.context > 1 and case.shard is None:
        raise RunError(
            "R202",
            f"context {layout.degrees.context} needs each rank's share of a batch: the case has no `shard`",
            hint="give Case(shard=...): a function of (batch, topology), or prove context 1",
        )
    if layout.degrees.world_size == 1:
        raise RunError(
            "R202",
            "one rank is one process: there is nothing to compare",
            hint="ask for two ranks or more, such as parallel.mesh.tensor=2",
        )
    if layout.sequence_parallel and layout.degrees.tensor == 1:
        raise RunError(
            "R202",
            "sequence parallelism lies on the tensor axis, and its degree is 1",
            hint="write parallel.mesh.tensor=2 or more",
        )


def _liven(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def _parameter(gradient: Gradient, applied: TensorParallel | None) -> ParameterResult:
    related = gradient.related
    close = max(gradient.errors) <= LIMITS["gradient"]
    joined = related.relation is Relation.EQUAL and max(gradient.errors) == float("inf")
    text = related.text if related.relation is not Relation.EQUAL else ""
    if not text and not close and not joined:
        text = f"is off by {max(gradient.errors):.1e}: more than rounding in fp64, less than a wrong sum"
    return ParameterResult(
        name=gradient.name,
        passed=not text,
        error=0.0 if joined else gradient.errors[0],
        error_two_backwards=0.0 if joined else gradient.errors[1],
        relation=related.relation.value,
        text=text,
        cause=likely_cause(gradient.name, related, applied),
    )


def _gradients(parameters: Sequence[ParameterResult]) -> Check:
    wrong = [parameter.name for parameter in parameters if not parameter.passed]
    error = max(max(parameter.error, parameter.error_two_backwards) for parameter in parameters)
    return Check(
        name="gradients",
        status=Status.FAILED if wrong else Status.PASSED,
        text=f"{len(parameters) - len(wrong)} of {len(parameters)} right under one and two backwards, "
        f"off by {error:.1e}",
        error=error,
        limit=LIMITS["gradient"],
    )


def _traffic(traffic: Sequence[dict[str, tuple[int, int]]]) -> Check:
    """Ranks must agree on the number of collectives; the numbers are told."""
    counts = [{kind: calls for kind, (calls, _) in one.items()} for one in traffic]
    agree = all(count == counts[0] for count in counts)
    told = ", ".join(f"{calls} {kind} {sent} B" for kind, (calls, sent) in sorted(traffic[0].items()))
    return Check(
        name="collectives",
        status=Status.PASSED if agree else Status.FAILED,
        text=(told or "none of evenspan's") + ("" if agree else ": the ranks differ"),
    )


def _name_of(case: Any) -> str:
    return case if isinstance(case, str) else f"{case.__module__}:{case.__qualname__}"
