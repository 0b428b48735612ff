"""A cached rollout equals recomputing every block over its clean prefix, as in teacher forcing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from evenspan.attention.patterns import teacher_forcing
from evenspan.attention.spans import TokenRange
from evenspan.errors import ModelError
from evenspan.model.flow import FlowSchedule
from evenspan.model.initialize import init_weights
from evenspan.model.presets import model_preset
from evenspan.model.rollout import KVCache, LayerStore, RolloutPlan, generate
from evenspan.model.wan import CausalWan

HEIGHT, WIDTH, CHANNELS, BATCH = 4, 6, 4, 2
TOKENS = 6
SCHEDULE = FlowSchedule(shift=5.0)
STEPS = 3


@pytest.fixture(scope="module")
def model() -> CausalWan:
    made = CausalWan(model_preset("wan-nano"), core="dense").double()
    init_weights(made, seed=3, head_std=0.3)
    return made


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _uncached(model: CausalWan, text: Tensor, prompts: Tensor, *, frames, block, window, sink, noise, given):
    """No cache: each velocity from one teacher-forced forward over [clean prefix | noisy block]."""
    sigmas = SCHEDULE.sampling_sigmas(STEPS).tolist()
    done = _normal(0, BATCH, 0, CHANNELS, HEIGHT, WIDTH)
    for index, start in enumerate(range(0, frames, block)):
        stop = min(start + block, frames)
        x = noise(index)
        own_given = given[:, start:stop]
        x[:, : own_given.shape[1]] = own_given
        moving = torch.ones(BATCH, stop - start, dtype=torch.float64)
        moving[:, : own_given.shape[1]] = 0
        for sigma, following in pairwise(sigmas):
            filler = torch.zeros(BATCH, start, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
            times = torch.cat((torch.zeros(BATCH, start, dtype=torch.float64), moving * 1000 * sigma), 1)
            velocity = model(
                torch.cat((filler, x), 1),
                times,
                text,
                positions_BF=torch.arange(stop).expand(BATCH, -1),
                prompt_of_frame_BF=prompts.repeat_interleave(block, 1)[:, :stop],
                table=teacher_forcing([(0, stop)], frame_per_block=block, window=window, sink=sink).scaled(
                    TOKENS
                ),
                clean_BFCHW=torch.cat((done, torch.full_like(x, 7.0)), 1),  # 7: must not be read
            )[:, start:]
            x = x + (following - sigma) * moving[:, :, None, None, None] * velocity
        done = torch.cat((done, x), 1)
    return done


@pytest.mark.parametrize(
    "case",
    [(6, 2, None, 0, 0), (7, 2, 2, 1, 0), (7, 3, 3, 0, 1), (8, 2, 3, 2, 3), (5, 1, 1, 2, 0), (6, 2, 0, 0, 2)],
)
def test_cached_equals_uncached(model: CausalWan, case: tuple[int, int, int | None, int, int]) -> None:
    frames, block, window, sink, given = case
    blocks = -(-frames // block)
    text = _normal(1, BATCH, 3, 5, 16)
    prompts = torch.tensor([[k % 3 for k in range(blocks)], [(k + 1) % 2 for k in range(blocks)]])
    initial = _normal(2, BATCH, given, CHANNELS, HEIGHT, WIDTH)

    def noise(index: int) -> Tensor:
        count = min(block, frames - index * block)
        return _normal(10 + index, BATCH, count, CHANNELS, HEIGHT, WIDTH)

    with torch.no_grad():
        expected = _uncached(
            model,
            text,
            prompts,
            frames=frames,
            block=block,
            window=window,
            sink=sink,
            noise=noise,
            given=initial,
        )
    got = generate(
        model,
        text_BNLE=text,
        prompt_of_frame_BF=prompts.repeat_interleave(block, 1)[:, :frames],
        frames=frames,
        frame_per_block=block,
        shape=(CHANNELS, HEIGHT, WIDTH),
        schedule=SCHEDULE,
        steps=STEPS,
        noise=noise,
        window=window,
        sink=sink,
        initial_BFCHW=initial if given else None,
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(got[:, :given], initial, rtol=0, atol=0)


def _sample(model: CausalWan, *, guidance: float, negative: Tensor | None, **options: object) -> Tensor:
    return generate(
        model,
        text_BNLE=_normal(1, BATCH, 1, 5, 16),
        prompt_of_frame_BF=torch.zeros(BATCH, 6, dtype=torch.long),
        frames=6,
        frame_per_block=2,
        shape=(CHANNELS, HEIGHT, WIDTH),
        schedule=SCHEDULE,
        steps=2,
        noise=lambda index: _normal(10 + index, BATCH, 2, CHANNELS, HEIGHT, WIDTH),
        guidance=guidance,
        negative_text_BNLE=negative,
        **options,  # type: ignore[arg-type]
    )


def test_guidance_with_the_prompt_itself_changes_nothing(model: CausalWan) -> None:
    plain = _sample(model, guidance=1.0, negative=None)
    same = _sample(model, guidance=4.0, negative=_normal(1, BATCH, 1, 5, 16))
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-12)
    other = _sample(model, guidance=4.0, negative=torch.zeros(BATCH, 1, 5, 16, dtype=torch.float64))
    assert (other - plain).abs().max() > 1e-6


def test_guidance_one_ignores_negative_text_and_zero_reads_only_it(model: CausalWan) -> None:
    negative = _normal(5, BATCH, 1, 5, 16)
    torch.testing.assert_close(
        _sample(model, guidance=1.0, negative=negative), _sample(model, guidance=1.0, negative=None)
    )
    assert (
        _sample(model, guidance=0.0, negative=negative) - _sample(model, guidance=1.0, negative=None)
    ).any()


def test_guidance_without_negative_text(model: CausalWan) -> None:
    with pytest.raises(ModelError, match=r"M106.*3\.0"):
        _sample(model, guidance=3.0, negative=None)


def test_a_cache_that_keeps_a_wrong_frame_is_caught(model: CausalWan, monkeypatch) -> None:
    """Mutant: keep the frame after the sink instead of the sink. The result must move."""
    right = _sample(model, guidance=1.0, negative=None, window=2, sink=1)
    keep = LayerStore.keep

    def mistaken(self: LayerStore, ranges) -> None:
        if len(ranges) == 2:
            (start, stop), window = ranges
            ranges = [TokenRange(start + TOKENS, stop + TOKENS), window]
        keep(self, ranges)

    monkeypatch.setattr(LayerStore, "keep", mistaken)
    wrong = _sample(model, guidance=1.0, negative=None, window=2, sink=1)
    assert (wrong - right).abs().max() > 1e-6


def test_the_cache_stays_as_small_as_window_and_sink() -> None:
    plan = RolloutPlan.build(100, frame_per_block=4, window=8, sink=2)
    assert plan.capacity_frames == 2 + 8 + 4
    assert plan.past[5] == (0, 1, *range(12, 20))
    cache = KVCache(plan, layers=0, tokens_per_frame=1)
    for block in range(25):
        assert cache.table(block).k_tokens == len(plan.past[block]) + 4
        cache.commit(block)
    assert cache.frames == ()
