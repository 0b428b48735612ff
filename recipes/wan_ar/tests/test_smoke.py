"""A few training steps: finite, equal on all ranks, equal to one process, each sample where it belongs."""

from __future__ import annotations

from evenspan.testing import (
    RecipeHooks,
    Smoke,
    assert_close,
    assert_equal_on_ranks,
    assert_finite,
    assert_local_length,
    assert_same_samples,
)


def test_losses_are_finite_and_equal_on_ranks(smoke: Smoke) -> None:
    assert_finite(smoke.ranks[0].losses, what="loss of step")
    assert_equal_on_ranks([run.losses for run in smoke.ranks], what="loss")
    assert_equal_on_ranks([run.grad_norms for run in smoke.ranks], what="gradient norm")


def test_ranks_learn_what_one_process_learns(smoke: Smoke) -> None:
    for run in smoke.ranks:
        assert_close(run.losses, smoke.one_process.losses, tolerance=smoke.tolerance, what="loss of step")
        assert_close(
            run.grad_norms, smoke.one_process.grad_norms, tolerance=smoke.tolerance, what="norm of step"
        )


def test_ranks_of_a_slot_read_the_same_samples(smoke: Smoke) -> None:
    for step in range(len(smoke.ranks[0].batches)):
        assert_same_samples([run.batches[step] for run in smoke.ranks], degrees=smoke.degrees)


def test_context_ranks_hold_their_share_of_the_frames(smoke: Smoke) -> None:
    assert_local_length(
        [run.inputs[""] for run in smoke.ranks],
        dim=1,
        total=smoke.one_process.inputs[""][1],
        degree=smoke.degrees.context,
        what="latent frames of the model's input",
    )


def test_recipe_checks(smoke: Smoke, recipe_hooks: RecipeHooks) -> None:
    recipe_hooks.check_smoke(smoke)
