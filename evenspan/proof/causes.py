"""From a wrong gradient to the module and the rule of the plan that likely made it wrong."""

from __future__ import annotations

from evenspan.parallel.plan import Mode
from evenspan.parallel.resolve import PlannedModule
from evenspan.parallel.tensor import TensorParallel
from evenspan.proof.relations import Related, Relation
from evenspan.topology.degrees import Axis

OFF_TENSOR = {
    Relation.MISSING_SUM: "gradients are not reduced over {axes}: FSDP2 must shard over it",
    Relation.TOO_LARGE: "each rank over {axes} divides by its own count, or gradients are summed twice",
    Relation.TOO_SMALL: "gradients are averaged over {axes}, or the loss is divided by a count of more ranks",
}
"""What explains a relation over an axis other than tensor."""

ANYWHERE = {
    Relation.ABSENT: "the path from {module} to the loss is cut: a detached tensor, or an output left unused",
    Relation.DROPPED_SHARD: "only one rank's tokens or features reach the loss: an exit gather is missing",
    Relation.SHAPE: "the layout keeps a shard that the ranks' shards do not add up to",
    Relation.DIFFERS_ON_RANKS: "some ranks see other input, or skip a reduction that the others do",
}
"""What explains a relation wherever it is."""

BOUNDARY = "compare what it gets with one process: a boundary before it changes its input"


def likely_cause(name: str, related: Related, applied: TensorParallel | None) -> str:
    """What to look at and what to change for the parameter `name`; empty where its gradient is right."""
    if related.relation is Relation.EQUAL:
        return ""
    module = name.rpartition(".")[0]
    entry = _entry(module, applied)
    axes = " and ".join(related.axes)
    if Axis.TENSOR in related.axes:
        cause = _tensor_cause(related, entry, applied)
    elif related.axes:
        return OFF_TENSOR[related.relation].format(axes=axes)
    else:
        cause = ANYWHERE.get(related.relation, BOUNDARY).format(module=module)
    return f"{_said(module, entry)}; {cause}"


def _tensor_cause(related: Related, entry: PlannedModule | None, applied: TensorParallel | None) -> str:
    summed = entry is not None and entry.mode in (Mode.SEQUENCE, Mode.HEAD_NORM)
    if related.relation is Relation.MISSING_SUM and applied is None:
        return "sum it over the tensor ranks before the optimizer's step"
    if related.relation is Relation.MISSING_SUM and summed:
        return "call complete_gradients(model) after the last backward"
    if related.relation is Relation.MISSING_SUM:
        return 'it works on this rank\'s tokens or heads: plan it as "sequence" or "head_norm"'
    if related.relation is Relation.TOO_SMALL:
        return "its gradient is averaged over the tensor ranks; each has a part of the sum"
    if summed:
        return "it works on whole input, or complete_gradients and a hook of the model both sum it"
    return "it is complete on each rank and summed all the same, or a gather before it adds up copies"


def _said(module: str, entry: PlannedModule | None) -> str:
    if entry is None:
        return f"no entry of a plan speaks of {module or 'the model itself'}"
    return f"{module} is planned as {entry.rule.at} = {entry.mode.value}"


def _entry(module: str, applied: TensorParallel | None) -> PlannedModule | None:
    if applied is None:
        return None
    return next((entry for entry in applied.resolved.modules if entry.path == module), None)
