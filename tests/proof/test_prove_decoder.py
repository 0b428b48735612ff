"""Proofs of the decoder on both axes, and mistakes of the context axis."""

from __future__ import annotations

import pytest

from evenspan.proof.report import Status
from evenspan.proof.run import prove
from evenspan.topology.degrees import Degrees
from tests.proof import decoder_cases as cases


def failed(report):
    return {check.name for check in report.checks if check.status is Status.FAILED}


def test_every_layout_of_four_ranks(world4):
    for degrees, sequence_parallel in [
        (Degrees(context=2, tensor=2), True),
        (Degrees(context=2, tensor=2), False),
        (Degrees(context=2, shard=2), False),
        (Degrees(shard=2, tensor=2), True),
        (Degrees(replicate=2, context=2), False),
    ]:
        report = prove(cases.good, degrees=degrees, sequence_parallel=sequence_parallel, pool=world4)
        assert report.passed, report.as_text()
        statuses = {check.name: check.status for check in report.checks}
        assert statuses["leakage"] is Status.PASSED
        assert statuses["positions"] is Status.PASSED


@pytest.mark.parametrize(
    ("mutant", "checks"),
    [
        (cases.labels_shifted_after_sharding, {"scored tokens", "positions", "gradients"}),
        (cases.positions_from_zero, {"positions", "loss of each token", "gradients"}),
        (cases.documents_forgotten, {"leakage", "loss of each token", "gradients"}),
    ],
)
def test_mistakes_of_the_context_axis(world2, mutant, checks):
    report = prove(mutant, degrees=Degrees(context=2), pool=world2)
    assert checks <= failed(report), report.as_text()
