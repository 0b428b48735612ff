"""From a single-device model to this rank's part of it: the only place that changes a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from evenspan.parallel.checkpointing import CheckpointingMode, apply_activation_checkpointing
from evenspan.parallel.context import apply_context
from evenspan.parallel.fsdp import Precision, shard_model
from evenspan.parallel.tensor import applied_plan, apply_tensor_plan
from evenspan.topology.degrees import Axis
from evenspan.topology.mesh import Topology


def parallelize(
    model: nn.Module,
    topology: Topology,
    *,
    blocks: nn.ModuleList,
    heads: int,
    attention: str = "attn1",
    sequence_parallel: bool = False,
    padding: bool = False,
    activation_checkpointing: CheckpointingMode = "none",
    mixed_precision: Precision = "fp32",
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    fp32_modules: Iterable[nn.Module] = (),
) -> None:
    """Makes `model` this rank's part of a run, in place: context, checkpointing, tensor plan, then FSDP2.

    `blocks` are the model's transformer blocks, each with a self-attention called `attention` that has a
    child `core`; `heads` are its query heads. A tensor
    axis applies the plan on the model's class, with `sequence_parallel` its sequence-parallel part too, where
    `padding` accepts tokens that the axis does not divide. The order matters: the exchange must lie inside
    what is checkpointed, the plan's boundaries inside a recomputed block, and FSDP2 must gather parameters
    around a recomputation, not inside it. State-dict keys do not change. Raises X101, M401, T301 and plan
    errors (P).
    """
    self_attentions = [block.get_submodule(attention) for block in blocks]
    apply_context(self_attentions, group=topology.group(Axis.CONTEXT), heads=heads // topology.degrees.tensor)
    apply_activation_checkpointing(blocks, mode=activation_checkpointing)
    if topology.tensor_mesh is not None:
        apply_tensor_plan(model, topology.tensor_mesh, sequence_parallel=sequence_parallel, padding=padding)
    shard_model(
        model,
        topology,
        blocks=blocks,
        mixed_precision=mixed_precision,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        fp32_modules=fp32_modules,
    )
    applied = applied_plan(model)
    if applied is not None:
        applied.bind(model)
