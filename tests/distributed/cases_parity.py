"""What each rank runs for the parity tests: one step's gradients under a layout, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenspan.attention.patterns import teacher_forcing
from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch, split_video_batch
from evenspan.model.initialize import init_weights
from evenspan.model.wan import CausalWan
from evenspan.parallel.sharded import joined
from evenspan.parallel.tensor import complete_gradients
from evenspan.testing import RankContext
from evenspan.topology.degrees import Degrees
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.layout import FrameLayout, FrameRange
from evenspan.topology.mesh import Topology, build_topology
from evenspan.train.build import model_config, place_model
from evenspan.train.objective import build_objective
from evenspan.train.step import accumulate_gradients

CHANNELS, HEIGHT, WIDTH = 12, 4, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout and one kind of batch."""

    context: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    """Whether the tensor ranks share the tokens between attention and feed-forward too."""
    frames: int = 8
    frame_per_block: int = 2
    padding: bool = False
    i2v: bool = False
    prompts: int = 1
    batch: int = 1
    micro_batches: int = 1
    valid: tuple[int, ...] = ()
    """Valid frames of sample 0, 1, ...; all frames where it ends."""
    activation_checkpointing: str = "none"
    teacher_forcing: bool = True
    window: int = -1
    sink: int = 0
    backwards: int = 1
    overrides: dict[str, object] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard


def config_of(case: Case, *, context: int) -> RunConfig:
    """The run configuration of `case` at another context degree."""
    mesh = {"replicate": case.replicate, "shard": case.shard, "tensor": case.tensor}
    return RunConfig.model_validate(
        {
            "model_kwargs": {
                "model_name": "wan-nano",
                "local_attn_size": case.window,
                "sink_size": case.sink,
                "overrides": {"in_channels": CHANNELS, "out_channels": CHANNELS, **case.overrides},
            },
            "sequence_parallel_size": context,
            "num_frame_per_block": case.frame_per_block,
            "image_or_video_shape": [case.batch, case.frames, CHANNELS, HEIGHT, WIDTH],
            "parallel": {
                "mesh": mesh,
                "backend_kwargs": {"sequence_parallel": case.sequence_parallel},
                "padding": "auto" if case.padding else "error",
                "mixed_precision": "fp64",
                "activation_checkpointing": case.activation_checkpointing,
            },
            "algorithm": {
                "i2v": case.i2v,
                "teacher_forcing": case.teacher_forcing,
            },
            "data": {"data_path": "unused"},
        }
    )


def global_batches(case: Case, *, text_dim: int) -> list[VideoBatch]:
    """Every micro-batch of the global batch, whole clips: replica-major, then micro-batch."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for number in range(case.dp * case.micro_batches):
        ids = tuple(range(number * case.batch, (number + 1) * case.batch))
        valid = torch.ones(case.batch, case.frames, dtype=torch.bool)
        for row, sample in enumerate(ids):
            if sample < len(case.valid):
                valid[row, case.valid[sample] :] = False
        blocks = torch.arange(case.frames) // case.frame_per_block
        batches.append(
            VideoBatch(
                latents_BFCHW=torch.randn(
                    case.batch, case.frames, CHANNELS, HEIGHT, WIDTH, generator=generator, dtype=torch.float64
                ),
                frames=FrameRange(0, case.frames),
                valid_BF=valid,
                sample_ids=ids,
                text_BNLE=torch.randn(
                    case.batch, case.prompts, 5, text_dim, generator=generator, dtype=torch.float64
                ),
                prompt_of_frame_BF=(blocks % case.prompts).expand(case.batch, -1).contiguous(),
                fingerprint=b"same",
                epochs=(0,) * case.batch,
            )
        )
    return batches


@cache
def topology_of(degrees: Degrees) -> Topology:
    """One mesh per layout for all cases: making groups takes longer than most cases."""
    return build_topology(degrees, device=torch.device("cpu"))


def reference_from_rank0(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The one-process result, computed once and sent to every rank."""
    result = [reference(case) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process that holds the whole batch and the whole sequence."""
    config = config_of(case, context=1)
    layout = FrameLayout(frames=case.frames, frame_per_block=case.frame_per_block, context=1, padding=True)
    model = new_model(config, core="dense")
    batches = global_batches(case, text_dim=model_config(config).text_dim)
    objective = build_objective(config, layout, seed=3)
    loss = torch.zeros(())
    for _ in range(case.backwards):
        loss, _count = accumulate_gradients(model, batches, objective, step=5, loss_group=None)
    grads = gradients(model)
    assert all(grad.norm() > 0 for grad in grads.values()), "a dead parameter would prove nothing"
    return loss, grads


def new_model(config: RunConfig, *, core: str = "auto") -> CausalWan:
    """The same random fp64 weights everywhere; biases and head are not zero, so every gradient is alive."""
    model = CausalWan(model_config(config), core=core).double()
    init_weights(model, seed=11, head_std=0.05)
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's full gradient by name; one that is missing counts as zero."""
    return {
        name: joined(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in model.named_parameters()
    }


def sharded(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and full gradients of this rank under the case's layout."""
    config = config_of(case, context=case.context)
    degrees = solve_degrees(config, world_size=case.context * case.dp * case.tensor)
    topology = topology_of(degrees)
    layout = frame_layout(config, tensor=degrees.tensor)
    model = new_model(config)
    batches = global_batches(case, text_dim=model_config(config).text_dim)
    place_model(model, config, topology)
    start = topology.coordinates.dp * case.micro_batches
    mine = [
        split_video_batch(batch, layout=layout, context_rank=topology.coordinates.context)
        for batch in batches[start : start + case.micro_batches]
    ]
    objective = build_objective(config, layout, seed=3)
    loss = torch.zeros(())
    for _ in range(case.backwards):
        loss, _count = accumulate_gradients(model, mine, objective, step=5, loss_group=topology.loss_group)
    complete_gradients(model)
    return loss, gradients(model)


@dataclass(frozen=True)
class Parity:
    """How far a layout is from one process, on one rank."""

    loss_error: float
    worst: float
    worst_name: str


def compare(case: Case) -> Parity:
    """Relative errors of the loss and of the worst parameter gradient."""
    loss_ref, grads_ref = reference_from_rank0(case)
    loss, grads = sharded(case)
    assert grads.keys() == grads_ref.keys()
    errors = {
        name: ((grads[name] - grad).norm() / grad.norm().clamp_min(1e-30)).item()
        for name, grad in grads_ref.items()
    }
    name = max(errors, key=lambda key: errors[key])
    return Parity(((loss - loss_ref).abs() / loss_ref.abs()).item(), errors[name], name)


def parity_of(ctx: RankContext, cases: list[Case]) -> list[Parity]:
    """One Parity a case; run on every rank."""
    assert ctx.world_size == cases[0].context * cases[0].dp * cases[0].tensor
    return [compare(case) for case in cases]


def parity_with_detached_values(_ctx: RankContext, case: Case) -> Parity:
    """Mutant: the exchange forgets the gradient of v. The forward is untouched."""
    from evenspan.parallel.context import UlyssesCore

    whole = UlyssesCore.forward

    def forgetful(self: UlyssesCore, q: Tensor, k: Tensor, v: Tensor, table: object) -> Tensor:
        return whole(self, q, k, v.detach(), table)

    UlyssesCore.forward = forgetful
    try:
        return compare(case)
    finally:
        UlyssesCore.forward = whole


def parity_with_local_positions(_ctx: RankContext, case: Case) -> Parity:
    """Mutant: every rank counts frames from 0."""
    from evenspan.train.objective import FlowObjective

    whole = FlowObjective._positions

    def local(self: FlowObjective, batch: VideoBatch) -> Tensor:
        return whole(self, batch) - batch.frames.start

    FlowObjective._positions = local
    try:
        return compare(case)
    finally:
        FlowObjective._positions = whole


def parity_with_local_count(_ctx: RankContext, case: Case) -> Parity:
    """Mutant: each rank divides by its own count of valid frames."""
    from evenspan.train import step

    whole = step.all_reduce_sum

    def no_reduction(value: Tensor, *, group: object) -> Tensor:
        del group
        return value.clone()

    step.all_reduce_sum = no_reduction
    try:
        return compare(case)
    finally:
        step.all_reduce_sum = whole


def parity_with_stale_table(_ctx: RankContext, case: Case, stale_frames: int) -> Parity:
    """Mutant: the attention table is the one of a clip of another length (same tokens, earlier end)."""
    from evenspan.train import objective

    whole = objective.attention_table

    def stale(config: RunConfig, layout: FrameLayout) -> object:
        if layout.context == 1:
            return whole(config, layout)
        shares = [(share.start, share.stop) for share in layout.shares]
        table = teacher_forcing(shares, frame_per_block=layout.frame_per_block, valid_frames=stale_frames)
        return table.scaled((HEIGHT // 2) * (WIDTH // 2))

    objective.attention_table = stale
    try:
        return compare(case)
    finally:
        objective.attention_table = whole
