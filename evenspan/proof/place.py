"""A user's model placed by evenspan's own means: its attention cores, the plan on its class, FSDP2."""

from __future__ import annotations

from torch import nn

from evenspan.attention.core import AttentionCore
from evenspan.parallel.context import apply_context
from evenspan.parallel.fsdp import shard_model
from evenspan.parallel.tensor import applied_plan, apply_tensor_plan
from evenspan.proof.case import Layout
from evenspan.topology.degrees import Axis
from evenspan.topology.mesh import Topology


def place(model: nn.Module, topology: Topology, layout: Layout) -> None:
    """Make `model` this rank's part of `layout`, in place, in fp64.

    Every child `core` that is an AttentionCore exchanges over the context axis; the tensor axis does what the
    plan on the model's class says. Raises M401, X101 and plan errors (P).
    """
    attentions = [
        module
        for module in model.modules()
        if isinstance(dict(module.named_children()).get("core"), AttentionCore)
    ]
    context = topology.group(Axis.CONTEXT)
    # The exchange itself checks the heads that it is given; here nobody knows them yet.
    apply_context(attentions, group=context, heads=context.size() if context is not None else 1)
    if topology.tensor_mesh is not None:
        apply_tensor_plan(
            model,
            topology.tensor_mesh,
            sequence_parallel=layout.sequence_parallel,
            padding=layout.padding,
        )
    shard_model(model, topology, blocks=(), mixed_precision="fp64")
    applied = applied_plan(model)
    if applied is not None:
        applied.bind(model)
