"""A rank's numbers against those of one process, and what all ranks together say of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenspan.proof.measure import Side
from evenspan.proof.relations import Related, Relation, relate, relative_error
from evenspan.proof.report import LIMITS, Check, Status
from evenspan.topology.degrees import Degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """One parameter's gradients on all ranks, after one and two backwards."""

    name: str
    errors: tuple[float, float]
    related: Related


def compare_gradients(side: Side, reference: Side, *, degrees: Degrees) -> list[Gradient]:
    """Every parameter's worst error over the ranks, and the relation of the wrong ones; a collective.

    Tensors of another shape than one process has are taken for shards that the user's own code keeps, and
    joined over the ranks where that gives the right shape.
    """
    found = []
    for name, want in reference.gradients[1].items():
        once = _everywhere(side.gradients[1].get(name), want)
        twice = _everywhere(side.gradients[2].get(name), reference.gradients[2][name])
        first = relate(once, want, degrees=degrees)
        second = relate(twice, reference.gradients[2][name], degrees=degrees)
        related = first
        if first.relation is Relation.EQUAL and second.relation is not Relation.EQUAL:
            related = Related(
                relation=second.relation,
                text=f"is right after one backward; after two it {second.text}",
                axes=second.axes,
                factor=second.factor,
            )
        errors = (
            max(relative_error(part, want) for part in once),
            max(relative_error(part, reference.gradients[2][name]) for part in twice),
        )
        found.append(Gradient(name=name, errors=errors, related=related))
    return found


def compare_side(side: Side, reference: Side, *, first_batch: int) -> list[Check]:
    """What this rank alone can say: everything but gradients and replicas."""
    checks = [_batches(side, reference, first_batch)]
    count_error = abs(side.count - reference.count)
    checks.append(
        Check(
            name="scored tokens",
            status=Status.PASSED if count_error == 0 else Status.FAILED,
            text=f"{side.count:g} of {reference.count:g}",
            error=count_error,
            limit=0.0,
        )
    )
    for number, want in reference.losses.items():
        error = abs(side.losses[number] - want) / max(abs(want), 1e-300)
        checks.append(_within(f"loss, backward {number}", error, "loss", f"{side.losses[number]:.15g}"))
    norm_error = abs(side.norm - reference.norm) / max(reference.norm, 1e-300)
    checks.append(_within("gradient norm", norm_error, "norm", f"{side.norm:.12g}"))
    for name, weights in reference.weights.items():
        checks.append(_weights(name, side.weights[name], weights))
    checks += _tokens(side, reference, first_batch)
    return checks


def merge_checks(checks: Sequence[Sequence[Check]]) -> list[Check]:
    """One check of each name: the worst rank's, named where ranks differ."""
    merged = []
    for same in zip(*checks, strict=True):
        ranks = [rank for rank, check in enumerate(same) if check.status is Status.FAILED]
        worst = max(same, key=lambda check: (check.status is Status.FAILED, check.error or 0.0))
        if ranks and len(ranks) < len(same):
            text = f"{worst.text} (ranks {', '.join(str(rank) for rank in ranks)})"
            worst = Check(
                name=worst.name, status=worst.status, text=text, error=worst.error, limit=worst.limit
            )
        merged.append(worst)
    return merged


def compare_replicas(sides: Sequence[Mapping[str, tuple[tuple[int, ...], str]]]) -> Check:
    """Ranks that hold the same shard of a weight after the optimizer's steps must hold the same bits."""
    differ = []
    for name in sides[0]:
        hashes: dict[tuple[int, ...], set[str]] = {}
        for side in sides:
            place, value = side[name]
            hashes.setdefault(place, set()).add(value)
        if any(len(values) > 1 for values in hashes.values()):
            differ.append(name)
    text = f"{len(sides[0])} weights bit for bit" if not differ else f"{len(differ)} differ: {_few(differ)}"
    return Check(name="replicas after steps", status=Status.FAILED if differ else Status.PASSED, text=text)


def compare_lengths(
    inputs: Sequence[Mapping[str, tuple[int, ...]]],
    reference: Mapping[str, tuple[int, ...]],
    *,
    requested: int,
) -> Check:
    """Some module must work on 1 / requested of one process's tokens; otherwise nothing is split."""
    name = "local length"
    if requested == 1:
        return Check(name=name, status=Status.NOT_RUN, text="the layout splits no sequence")
    observed = 1.0
    for rank_inputs in inputs:
        best = 1.0
        for module, shape in rank_inputs.items():
            best = max(best, _degree(shape, reference.get(module, shape), requested))
        observed = best if observed == 1.0 else min(observed, best)
    passed = observed >= requested
    return Check(
        name=name,
        status=Status.PASSED if passed else Status.FAILED,
        text=f"requested a sequence over {requested} ranks, observed {observed:g}",
    )


def _degree(local: tuple[int, ...], whole: tuple[int, ...], requested: int) -> float:
    """By how much one dim is shorter than in one process; 1 when the shapes do not say."""
    if len(local) != len(whole):
        return 1.0
    shorter = [(mine, theirs) for mine, theirs in zip(local, whole, strict=True) if mine != theirs]
    if len(shorter) != 1 or not shorter[0][0] or shorter[0][0] > shorter[0][1]:
        return 1.0
    mine, theirs = shorter[0]
    return float(requested) if mine == ceil(theirs / requested) else theirs / mine


def _everywhere(part: Tensor | None, want: Tensor) -> list[Tensor]:
    """Every rank's tensor in rank order; shards of the right total joined."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, torch.zeros_like(want) if part is None else part)
    if all(other.shape == want.shape for other in parts):
        return parts
    for dim in range(want.dim()):
        sizes = [other.shape[dim] for other in parts if other.dim() == want.dim()]
        if len(sizes) == len(parts) and sum(sizes) == want.shape[dim]:
            joined = torch.cat(parts, dim=dim)
            if joined.shape == want.shape:
                return [joined] * len(parts)
    return parts


def _batches(side: Side, reference: Side, first: int) -> Check:
    mine = reference.batches[first : first + len(side.batches)]
    passed = side.batches == mine
    text = f"micro-batches {first} to {first + len(mine) - 1}"
    return Check(
        name="batches",
        status=Status.PASSED if passed else Status.FAILED,
        text=f"{text} as in one process" if passed else f"{text} hold other values than in one process",
    )


def _within(name: str, error: float, limit: str, text: str) -> Check:
    passed = isfinite(error) and error <= LIMITS[limit]
    return Check(
        name=name,
        status=Status.PASSED if passed else Status.FAILED,
        text=f"{text}, off by {error:.1e}",
        error=error,
        limit=LIMITS[limit],
    )


def _weights(optimizer: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> Check:
    name = f"weights, {optimizer}"
    errors = {
        key: relative_error(got[key], value)
        for key, value in want.items()
        if key in got and got[key].shape == value.shape
    }
    if not errors:
        return Check(name=name, status=Status.NOT_RUN, text="the layout keeps its own shards of every weight")
    worst = max(errors, key=lambda key: errors[key])
    return _within(name, errors[worst], "weights", f"{len(errors)} compared, worst {worst}")


def _tokens(side: Side, reference: Side, first: int) -> list[Check]:
    checks = []
    mine = reference.per_token[first : first + len(side.batches)]
    if side.per_token:
        error = max(relative_error(a, b) for a, b in zip(side.per_token, mine, strict=True))
        checks.append(_within("loss of each token", error, "tokens", f"{mine[0].numel()} a micro-batch"))
    else:
        text = "the loss gives no `per_token`"
        checks.append(Check(name="loss of each token", status=Status.NOT_RUN, text=text))
    if side.observed:
        checks.append(_observed(side, reference, first))
    else:
        text = "the case observes no facts of its batches"
        checks.append(Check(name="positions", status=Status.NOT_RUN, text=text))
    checks.append(_probes(side, reference, first))
    return checks


def _observed(side: Side, reference: Side, first: int) -> Check:
    wrong = sorted(
        {
            name
            for facts, want in zip(side.observed, reference.observed[first:], strict=False)
            for name in want
            if not torch.equal(facts[name], want[name])
        }
    )
    return Check(
        name="positions",
        status=Status.FAILED if wrong else Status.PASSED,
        text=f"{', '.join(wrong)} joined over the ranks are not those of one process"
        if wrong
        else f"{', '.join(sorted(side.observed[0]))} joined over the ranks",
    )


def _probes(side: Side, reference: Side, first: int) -> Check:
    """Which tokens notice that one was changed; only the first data slot reads the batch that is probed."""
    name = "leakage"
    if not reference.probes or first:
        text = "nothing to probe on this data slot" if first else "the case gives no `perturb` and `tokens`"
        return Check(name=name, status=Status.NOT_RUN, text=text)
    seen = []
    for token, want in reference.probes.items():
        got = side.probes[token]
        base = reference.per_token[0]
        ours, theirs = (got - base).abs() > 1e-9, (want - base).abs() > 1e-9
        if not torch.equal(ours, theirs):
            extra = (ours & ~theirs).nonzero()[:3].tolist()
            missing = (theirs & ~ours).nonzero()[:3].tolist()
            text = f"token {token} changed: also seen at {extra}, not seen at {missing} ([sample, token])"
            return Check(name=name, status=Status.FAILED, text=text)
        seen.append(f"token {token} is seen by {int(theirs.sum())}")
    return Check(name=name, status=Status.PASSED, text=f"{', '.join(seen)}, as in one process")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
