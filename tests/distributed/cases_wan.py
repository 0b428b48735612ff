"""What ranks run for the parity of the causal Wan DiT itself."""

import torch

from evenspan.attention.patterns import teacher_forcing
from evenspan.comm.meter import CommMeter
from evenspan.model.presets import model_preset
from evenspan.model.wan import CausalWan
from evenspan.parallel.apply import parallelize
from evenspan.topology.degrees import Degrees
from evenspan.topology.layout import FrameLayout
from evenspan.topology.mesh import build_topology
from tests.distributed.cases_context import relative_error

BATCH, FRAMES, HEIGHT, WIDTH, PROMPTS = 2, 6, 4, 4, 3


def _inputs():
    config = model_preset("wan-nano")
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    latents = (BATCH, FRAMES, config.in_channels, HEIGHT, WIDTH)
    frames = torch.arange(FRAMES).expand(BATCH, FRAMES)
    return {
        "noisy_BFCHW": draw(*latents),
        "timesteps_BF": 1000 * torch.rand(BATCH, FRAMES, dtype=torch.float64, generator=generator),
        "text_BNLE": draw(BATCH, PROMPTS, 5, config.text_dim),
        "positions_BF": frames,
        "prompt_of_frame_BF": frames // 2,
        "clean_BFCHW": draw(*latents),
    }


def _model(dtype):
    torch.manual_seed(11)
    model = CausalWan(model_preset("wan-nano"))
    for parameter in model.parameters():  # published initial values hide errors behind zeros
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def _loss(model, inputs, layout, share):
    """Squared velocity of the valid frames of `share`, over the count of the whole clip."""
    whole = {name: value if name == "text_BNLE" else _pad(value, layout) for name, value in inputs.items()}
    local = {
        name: value if name == "text_BNLE" else value[:, share.start : share.stop]
        for name, value in whole.items()
    }
    config = model.config
    table = teacher_forcing(
        [(s.start, s.stop) for s in layout.shares],
        frame_per_block=layout.frame_per_block,
        valid_frames=layout.frames,
    ).scaled(config.tokens_per_frame(HEIGHT, WIDTH))
    velocity = model(**local, table=table)
    valid = torch.arange(share.start, share.stop) < layout.frames
    return velocity[:, valid].double().square().sum() / inputs["noisy_BFCHW"].numel()


def _pad(x_BF, layout):
    missing = layout.padded_frames - layout.frames
    return torch.cat([x_BF, x_BF[:, :1].expand(-1, missing, *x_BF.shape[2:])], dim=1) if missing else x_BF


def parity(ctx, frame_per_block, mode, precision):
    """Relative errors of every gradient and the exchanges of a step of CausalWan with P = world size."""
    inputs = _inputs()
    model = _model(torch.float64)
    layout = FrameLayout(frames=FRAMES, frame_per_block=frame_per_block, context=ctx.world_size, padding=True)
    topology = build_topology(Degrees(context=ctx.world_size), device=ctx.device)
    parallelize(
        model,
        topology,
        blocks=model.blocks,
        heads=model.config.num_attention_heads,
        activation_checkpointing=mode,
        mixed_precision=precision,
        fp32_modules=[model.condition_embedder.time_embedder],
    )
    with CommMeter() as meter:
        _loss(model, inputs, layout, layout.share(ctx.rank)).backward()
    single = FrameLayout(frames=FRAMES, frame_per_block=frame_per_block, context=1, padding=True)
    reference = _model(torch.float64)
    _loss(reference, inputs, single, single.share(0)).backward()
    errors = {
        name: relative_error(p.grad.full_tensor().double(), q.grad)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)
    }
    return errors, meter.calls("exchange"), model.config.num_layers
