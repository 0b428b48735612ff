"""Proofs of right layouts pass; each mistake is found by gradients and named, though the loss agrees."""

from __future__ import annotations

import pytest

from evenspan.errors import PlanError, RunError
from evenspan.proof.report import Status
from evenspan.proof.run import prove
from evenspan.topology.degrees import Degrees
from tests.proof import cases, mutants

TWO = Degrees(tensor=2)


def status(report, name):
    return next(check.status for check in report.checks if check.name == name)


def failed(report):
    return {check.name for check in report.checks if check.status is Status.FAILED}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_tensor_ranks(world2, sequence_parallel):
    report = prove(cases.good, degrees=TWO, sequence_parallel=sequence_parallel, pool=world2)
    assert report.passed, report.as_text()
    assert len(report.parameters) == 42
    assert report.worst.error <= 1e-10
    assert status(report, "leakage") is Status.PASSED


def test_four_ranks(world4):
    for degrees in (Degrees(tensor=2, shard=2), Degrees(tensor=4), Degrees(replicate=2, shard=2)):
        report = prove(cases.good, degrees=degrees, sequence_parallel=degrees.tensor > 1, pool=world4)
        assert report.passed, report.as_text()


@pytest.mark.parametrize(
    ("mutant", "name", "relation", "cause"),
    [
        (mutants.missing_sum, mutants.NORM, "missing sum", "Block.input_layernorm = sequence"),
        (mutants.unsummed_head_norm, "layers.0.self_attn.q_norm.weight", "missing sum", "head_norm"),
        (mutants.summed_twice, "layers.0.self_attn.q_proj.weight", "too large", "Attention.q_proj = col"),
        (mutants.averaged, "layers.1.mlp.gate_proj.weight", "too small", "averaged over the tensor ranks"),
        (mutants.detached, "layers.1.mlp.up_proj.weight", "absent", "detached tensor"),
    ],
)
def test_wrong_gradients_are_named_though_the_loss_agrees(world2, mutant, name, relation, cause):
    report = prove(mutant, degrees=TWO, sequence_parallel=True, pool=world2)
    assert status(report, "loss, backward 1") is Status.PASSED
    assert status(report, "gradients") is Status.FAILED
    found = {parameter.name: parameter for parameter in report.parameters}[name]
    assert not found.passed
    assert found.relation == relation
    assert cause in found.cause
    assert f"{name} {found.text}" in report.as_text()
    assert not report.as_json()["passed"]


def test_a_hook_that_reduces_again_fails_at_the_second_backward(world2):
    report = prove(mutants.reduced_again, degrees=TWO, sequence_parallel=True, pool=world2)
    found = {parameter.name: parameter for parameter in report.parameters}[mutants.NORM]
    assert found.error <= 1e-10
    assert found.error_two_backwards > 0.1
    assert "right after one backward; after two it is 1.5 times the right one" in found.text


def test_a_layout_that_is_ignored_is_found(world2):
    report = prove(mutants.ignored, degrees=TWO, sequence_parallel=True, pool=world2)
    assert failed(report) == {"local length"}
    check = next(check for check in report.checks if check.name == "local length")
    assert "requested a sequence over 2 ranks, observed 1" in check.text


def test_loaders_by_global_rank_are_found(world2):
    report = prove(mutants.other_batches, degrees=TWO, sequence_parallel=True, pool=world2)
    assert "batches" in failed(report)
    assert "(ranks 1)" in next(check.text for check in report.checks if check.name == "batches")


def test_means_of_local_means_are_found(world2):
    report = prove(mutants.mean_of_local_means, degrees=Degrees(shard=2), pool=world2)
    assert {"loss, backward 1", "gradients"} <= failed(report)


@pytest.mark.parametrize(
    ("case", "degrees", "code", "fact"),
    [
        ("nowhere:case", TWO, "R201", "nowhere cannot be imported"),
        ("tests.proof.cases", TWO, "R201", "names no case"),
        ("tests.proof.cases:god", TWO, "R201", "did you mean good"),
        (mutants.no_case, TWO, "R201", "returned int"),
        (cases.good, Degrees(context=2), "R202", "no `shard`"),
        (cases.good, Degrees(), "R202", "one rank is one process"),
        (mutants.unseeded, TWO, "R203", r"batch(0) gives other values"),
        (mutants.drawing_forward, TWO, "R203", "the loss of batch 0 is"),
    ],
)
def test_cases_that_prove_nothing(world2, case, degrees, code, fact):
    with pytest.raises(RunError) as raised:
        prove(case, degrees=degrees, pool=world2)
    assert raised.value.code == code
    assert fact in str(raised.value)


def test_sequence_parallel_needs_a_tensor_axis(world2):
    with pytest.raises(RunError, match="R202 sequence parallelism lies on the tensor axis"):
        prove(cases.good, degrees=Degrees(shard=2), sequence_parallel=True, pool=world2)


def test_plan_errors_keep_their_names(world2):
    with pytest.raises(PlanError, match="P106") as raised:
        prove(cases.odd_width, degrees=TWO, pool=world2)
    assert "which do not divide" in raised.value.fact
