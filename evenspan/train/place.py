"""From the parallel section of a configuration to this rank's part of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from evenspan.config.base import ParallelConfig
from evenspan.parallel.apply import parallelize
from evenspan.topology.mesh import Topology


def place(
    model: nn.Module,
    parallel: ParallelConfig,
    topology: Topology,
    *,
    blocks: nn.ModuleList,
    attention: str,
    heads: int,
    fp32_modules: Iterable[nn.Module] = (),
) -> None:
    """Parallelize `model` in place as `parallel` says; see `parallelize` for the rest and what it raises."""
    parallelize(
        model,
        topology,
        blocks=blocks,
        attention=attention,
        heads=heads,
        # No `padding`: the layouts already fill every share up to what the tensor ranks divide.
        sequence_parallel=parallel.backend_kwargs.sequence_parallel,
        activation_checkpointing=parallel.activation_checkpointing,
        mixed_precision=parallel.mixed_precision,
        reshard_after_forward=parallel.backend_kwargs.fsdp2.reshard_after_forward,
        cpu_offload=parallel.backend_kwargs.fsdp2.cpu_offload,
        fp32_modules=fp32_modules,
    )
