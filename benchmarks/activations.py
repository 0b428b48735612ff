"""Bytes that autograd keeps for backward on each rank, at P = 1, 2, 4 context ranks. Prints a table last.

    python -m benchmarks.activations

The model, the clip and the objective are those of training; every rank counts the storages that
torch.autograd.graph.saved_tensors_hooks shows it, parameters left out, each storage once.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch, split_video_batch
from evenspan.testing import RankContext, RankPool
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.layout import FrameRange
from evenspan.topology.mesh import build_topology
from evenspan.train.build import build_model, model_config
from evenspan.train.objective import build_objective

FRAMES, CHANNELS, HEIGHT, WIDTH, BLOCK = 32, 48, 16, 16, 4


def config_at(context: int, checkpointing: str) -> RunConfig:
    """A tiny Wan on 32 latent frames of 64 tokens."""
    return RunConfig.model_validate(
        {
            "model_kwargs": {"model_name": "wan-tiny"},
            "sequence_parallel_size": context,
            "num_frame_per_block": BLOCK,
            "image_or_video_shape": [1, FRAMES, CHANNELS, HEIGHT, WIDTH],
            "parallel": {
                "activation_checkpointing": checkpointing,
                # Freed storages of parameters would be taken for those of activations.
                "backend_kwargs": {"fsdp2": {"reshard_after_forward": False}},
            },
            "data": {"data_path": "unused"},
        }
    )


def saved_bytes(ctx: RankContext, context: int, checkpointing: str) -> int:
    """Bytes saved for backward by one forward on this rank."""
    config = config_at(context, checkpointing)
    degrees = solve_degrees(config, world_size=ctx.world_size)
    topology = build_topology(degrees, device=torch.device("cpu"))
    layout = frame_layout(config)
    model = build_model(config, topology)
    batch = split_video_batch(
        clip(model_config(config).text_dim), layout=layout, context_rank=topology.coordinates.context
    )
    objective = build_objective(config, layout, seed=0)
    counted = SavedStorages(model)
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda tensor: tensor):
        loss = objective.loss(model, batch, step=0)
    total = counted.total
    loss.sum.backward()
    return total


class SavedStorages:
    """Counts the bytes of every storage shown to it once; parameters do not count.

    What FSDP gathers are parameters too, in storages that are only known when a module is about to run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []
        self.total = 0
        for module in model.modules():
            module.register_forward_pre_hook(self._leave_out_parameters)

    def _leave_out_parameters(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self._seen.add(local.untyped_storage().data_ptr())

    def pack(self, tensor: Tensor) -> Tensor:
        """The hook: note the storage, keep the tensor as it is."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor)
            self.total += storage.nbytes()
        return tensor


def clip(text_dim: int) -> VideoBatch:
    """One random clip, whole."""
    generator = torch.Generator().manual_seed(0)
    return VideoBatch(
        latents_BFCHW=torch.randn(1, FRAMES, CHANNELS, HEIGHT, WIDTH, generator=generator),
        frames=FrameRange(0, FRAMES),
        valid_BF=torch.ones(1, FRAMES, dtype=torch.bool),
        sample_ids=(0,),
        text_BNLE=torch.randn(1, 1, 16, text_dim, generator=generator),
        prompt_of_frame_BF=torch.zeros(1, FRAMES, dtype=torch.long),
        fingerprint=b"clip",
        epochs=(0,),
    )


def main() -> None:
    """Measure every degree and print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows: dict[tuple[str, int], int] = {}
    for context in (1, 2, 4):
        pool = RankPool(context)
        for checkpointing in ("none", "selective", "full"):
            rows[checkpointing, context] = max(pool.run(saved_bytes, context, checkpointing))
        pool.close()
    print(f"wan-tiny, {FRAMES} latent frames x {HEIGHT * WIDTH // 4} tokens, clean and noisy, fp32")
    print(f"{'checkpointing':<14}{'P':>3}{'saved MiB, worst rank':>24}{'of P=1':>9}")
    for (checkpointing, context), total in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1])):
        share = total / rows[checkpointing, 1]
        print(f"{checkpointing:<14}{context:>3}{total / 2**20:>24.2f}{share:>9.4f}")


if __name__ == "__main__":
    main()
