"""The causal DiT against diffusers, teacher forcing against its definition, and the errors of its inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from evenspan.attention.patterns import block_causal, full, teacher_forcing
from evenspan.errors import ModelError, ShapeError
from evenspan.model.initialize import init_weights
from evenspan.model.presets import PRESETS, model_preset
from evenspan.model.wan import CausalWan
from evenspan.model.wan_blocks import CrossAttention, PromptRun, prompt_runs
from evenspan.model.wan_config import WanConfig

NANO = model_preset("wan-nano")
BATCH, FRAMES, HEIGHT, WIDTH, TOKENS = 2, 4, 4, 6, 6


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _latents(seed: int, frames: int = FRAMES, dtype: torch.dtype = torch.float64) -> Tensor:
    return _normal(seed, BATCH, frames, NANO.in_channels, HEIGHT, WIDTH, dtype=dtype)


def _positions(frames: int = FRAMES, start: int = 0) -> Tensor:
    return torch.arange(start, start + frames).expand(BATCH, -1)


def _prompts(frames: int = FRAMES) -> Tensor:
    return torch.zeros(BATCH, frames, dtype=torch.long)


@pytest.fixture(scope="module")
def model() -> CausalWan:
    made = CausalWan(NANO, core="dense").double()
    init_weights(made, seed=1, head_std=0.3)
    return made


def _reference(config: WanConfig) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(**dataclasses.asdict(config))


@pytest.mark.parametrize("per_frame", [False, True])
@pytest.mark.parametrize("name", ["wan-nano", "wan-tiny"])
def test_outputs_equal_diffusers(name: str, per_frame: bool) -> None:
    config = model_preset(name)
    reference = _reference(config)
    model = CausalWan(config)
    model.load_state_dict(reference.state_dict(), strict=True)
    noisy = _normal(1, BATCH, FRAMES, config.in_channels, HEIGHT, WIDTH, dtype=torch.float32)
    text = _normal(2, BATCH, 1, 5, config.text_dim, dtype=torch.float32)
    times = torch.tensor([[1000.0, 0.0, 733.25, 5.0], [4.98, 500.0, 999.0, 1.5]])
    if not per_frame:
        times = times[:, 2:3].expand(-1, FRAMES)
    with torch.no_grad():
        expected = reference(
            noisy.transpose(1, 2),
            times.repeat_interleave(TOKENS, 1) if per_frame else times[:, 0],
            text[:, 0],
        ).sample.transpose(1, 2)
        got = model(
            noisy,
            times,
            text,
            positions_BF=_positions(),
            prompt_of_frame_BF=_prompts(),
            table=full(FRAMES * TOKENS),
        )
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_every_gradient_equals_diffusers() -> None:
    reference, model = _reference(NANO), CausalWan(NANO)
    model.load_state_dict(reference.state_dict(), strict=True)
    noisy, text = _latents(1, dtype=torch.float32), _normal(2, BATCH, 1, 5, 16, dtype=torch.float32)
    times = torch.full((BATCH, FRAMES), 321.5)
    reference(noisy.transpose(1, 2), times[:, 0], text[:, 0]).sample.square().sum().backward()
    _forward(model, noisy, times, text).square().sum().backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = wanted[name].grad
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= 2e-5 * expected.norm() + 1e-6, name


def _forward(model: CausalWan, noisy: Tensor, times: Tensor, text: Tensor) -> Tensor:
    frames = noisy.shape[1]
    out: Tensor = model(
        noisy,
        times,
        text,
        positions_BF=_positions(frames),
        prompt_of_frame_BF=_prompts(frames),
        table=full(frames * TOKENS),
    )
    return out


def test_the_published_model_on_meta() -> None:
    with torch.device("meta"):
        reference, model = (
            _reference(model_preset("Wan2.2-TI2V-5B")),
            CausalWan(model_preset("Wan2.2-TI2V-5B")),
        )
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in reference.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == 4_999_787_712


def test_presets_divide_over_four_ranks() -> None:
    assert all(config.num_attention_heads % 4 == 0 for config in PRESETS.values())
    assert model_preset("Wan2.2-TI2V-5B").rope_dims == (44, 42, 42)


def _teacher_forced(model: CausalWan, clean: Tensor, noisy: Tensor, text: Tensor, prompts: Tensor) -> Tensor:
    frames = noisy.shape[1]
    out: Tensor = model(
        noisy,
        _times(frames),
        text,
        positions_BF=_positions(frames),
        prompt_of_frame_BF=prompts,
        table=teacher_forcing([(0, frames)], frame_per_block=2).scaled(TOKENS),
        clean_BFCHW=clean,
        clean_timesteps_BF=torch.full((BATCH, frames), 20.0),
    )
    return out


def _times(frames: int) -> Tensor:
    return torch.linspace(900, 100, BATCH * frames, dtype=torch.float64).view(BATCH, frames)


def test_teacher_forcing_equals_block_causal_passes(model: CausalWan) -> None:
    """Noisy block b of a teacher-forced pass = the last block of a pass over [clean < b, noisy b]."""
    clean, noisy, text = _latents(1, 6), _latents(2, 6), _normal(3, BATCH, 2, 5, 16)
    prompts = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        got = _teacher_forced(model, clean, noisy, text, prompts)
        for start in range(0, 6, 2):
            stop = start + 2
            mixed_times = torch.cat((torch.full((BATCH, start), 20.0), _times(6)[:, start:stop]), 1)
            expected = model(
                torch.cat((clean[:, :start], noisy[:, start:stop]), 1),
                mixed_times,
                text,
                positions_BF=_positions(stop),
                prompt_of_frame_BF=prompts[:, :stop],
                table=block_causal(stop, frame_per_block=2).scaled(TOKENS),
            )[:, start:]
            torch.testing.assert_close(got[:, start:stop], expected, rtol=0, atol=1e-12)


def test_positions_travel_with_the_batch(model: CausalWan) -> None:
    """RoPE is relative: moving every frame by 7 changes nothing, moving one changes the others."""
    noisy, text = _latents(1), _normal(2, BATCH, 1, 5, 16)

    def run(positions: Tensor) -> Tensor:
        out: Tensor = model(
            noisy,
            _times(FRAMES),
            text,
            positions_BF=positions,
            prompt_of_frame_BF=_prompts(),
            table=full(FRAMES * TOKENS),
        )
        return out

    with torch.no_grad():
        torch.testing.assert_close(run(_positions(start=7)), run(_positions()), rtol=0, atol=1e-11)
        moved = _positions().clone()
        moved[:, -1] += 1
        assert (run(moved) - run(_positions()))[:, 0].abs().max() > 1e-6


def test_prompt_runs() -> None:
    assert prompt_runs([[1, 1], [1, 1]], copies=2, tokens_per_frame=3) == (PromptRun(None, 0, 12, 1),)
    assert prompt_runs([[0, 1]], copies=2, tokens_per_frame=3) == (
        PromptRun(None, 0, 3, 0),
        PromptRun(None, 3, 6, 1),
        PromptRun(None, 6, 9, 0),
        PromptRun(None, 9, 12, 1),
    )
    assert prompt_runs([[0], [1]], copies=1, tokens_per_frame=2) == (
        PromptRun(0, 0, 2, 0),
        PromptRun(1, 0, 2, 1),
    )


@pytest.mark.parametrize(
    "rows", [[[0, 0, 1, 2], [2, 1, 1, 0]], [[1, 1, 0, 0], [1, 1, 0, 0]], [[2] * 4, [2] * 4]]
)
def test_each_frame_reads_its_own_prompt(rows: list[list[int]]) -> None:
    torch.manual_seed(0)
    attention = CrossAttention(NANO).double()
    x, text = _normal(1, BATCH, 2 * FRAMES * 3, NANO.width), _normal(2, BATCH, 3, 5, NANO.width)
    got = attention(x, text_BNLE=text, runs=prompt_runs(rows, copies=2, tokens_per_frame=3))
    for sample, row in enumerate(rows):
        for place, prompt in enumerate(row * 2):
            tokens = slice(3 * place, 3 * place + 3)
            alone = attention(
                x[sample : sample + 1, tokens],
                text_BNLE=text[sample : sample + 1, prompt : prompt + 1],
                runs=(PromptRun(None, 0, 3, 0),),
            )
            torch.testing.assert_close(got[sample : sample + 1, tokens], alone, rtol=0, atol=1e-12)


def test_double_is_never_narrowed_and_bf16_keeps_fp32_time(model: CausalWan) -> None:
    """1e-9 in t is lost in fp32 and must be seen in fp64; in bf16, t = 999 and 1000 must differ."""
    noisy, text = _latents(1), _normal(2, BATCH, 1, 5, 16)
    times = torch.full((BATCH, FRAMES), 500.0, dtype=torch.float64)
    with torch.no_grad():
        plain = _forward(model, noisy, times, text)
        assert plain.dtype == torch.float64
        assert 0 < (_forward(model, noisy, times + 1e-9, text) - plain).abs().max() < 1e-6
        narrow = CausalWan(NANO, core="dense")
        narrow.load_state_dict(model.state_dict())
        narrow = narrow.to(torch.bfloat16)
        embed = narrow.condition_embedder
        e, e0, _ = embed(torch.tensor([[999.0, 1000.0]]), text.bfloat16())
        assert (e.dtype, e0.dtype) == (torch.float32, torch.float32)
        assert (e[:, 0] - e[:, 1]).abs().max() > 0
        close = _forward(narrow, noisy, times, text)
        assert close.dtype == torch.bfloat16
        assert (close.double() - plain).norm() < 0.05 * plain.norm()


def test_gradients_are_bit_identical_between_runs(model: CausalWan) -> None:
    clean, noisy, text = _latents(1), _latents(2), _normal(3, BATCH, 2, 5, 16)
    prompts = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    grads = []
    for _ in range(2):
        loss = _teacher_forced(model, clean, noisy, text, prompts).square().sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(g.abs().max() > 0 for g in grads[0])


def test_init_depends_on_seed_and_name_only(model: CausalWan) -> None:
    torch.manual_seed(5)
    first, other = CausalWan(NANO), CausalWan(NANO)
    init_weights(first, seed=1)
    init_weights(other, seed=2)
    again = CausalWan(NANO).double()
    init_weights(again, seed=1)
    for name, value in first.state_dict().items():
        assert torch.equal(value.double(), again.state_dict()[name]), name
    assert not torch.equal(first.blocks[0].ffn.net[2].weight, other.blocks[0].ffn.net[2].weight)
    assert not torch.equal(first.blocks[0].ffn.net[2].weight, first.blocks[1].ffn.net[2].weight)
    assert not first.proj_out.weight.any()
    text_weight = first.condition_embedder.text_embedder.linear_2.weight
    assert 0.019 < text_weight.detach().std() < 0.021


def test_input_errors(model: CausalWan) -> None:
    text, table = _normal(2, BATCH, 1, 5, 16), full(FRAMES * TOKENS)
    good = {"positions_BF": _positions(), "prompt_of_frame_BF": _prompts(), "table": table}
    with pytest.raises(ShapeError, match=r"S301 latent size 5 x 6"):
        model(torch.zeros(BATCH, FRAMES, 4, 5, 6), _times(FRAMES), text, **good)
    with pytest.raises(ShapeError, match=r"S302 latents .* 3 channels"):
        model(torch.zeros(BATCH, FRAMES, 3, 4, 6), _times(FRAMES), text, **good)
    with pytest.raises(ShapeError, match=r"S302 timesteps_BF"):
        model(_latents(1), _times(FRAMES + 1), text, **good)
    with pytest.raises(ShapeError, match=r"S302 prompt_of_frame_BF names prompts 1 to 1"):
        model(_latents(1), _times(FRAMES), text, **{**good, "prompt_of_frame_BF": _prompts() + 1})
    with pytest.raises(ModelError, match=r"M104 frame positions run from 1021 to 1024"):
        model(_latents(1), _times(FRAMES), text, **{**good, "positions_BF": _positions(start=1021)})


def test_config_errors() -> None:
    with pytest.raises(ModelError, match=r"M101 .*'Wan2.2-TI2V-5b'; nearest: Wan2.2-TI2V-5B"):
        model_preset("Wan2.2-TI2V-5b")
    with pytest.raises(ModelError, match=r"M103 .*num_layer \(nearest: num_layers"):
        NANO.with_overrides({"num_layer": 3})
    for field, value in [
        ("patch_size", (2, 2, 2)),
        ("attention_head_dim", 7),
        ("qk_norm", None),
        ("image_dim", 8),
    ]:
        with pytest.raises(ModelError, match=f"M102 model field {field}"):
            NANO.with_overrides({field: value})
    assert NANO.with_overrides({"patch_size": [1, 1, 1]}).patch_size == (1, 1, 1)
