"""What each rank runs for the tests of text training: one step's gradients under a layout, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evenspan.config.text_schema import TextRunConfig
from evenspan.data.loader import MicroBatchLoader
from evenspan.parallel.tensor import complete_gradients
from evenspan.testing import RankContext
from evenspan.topology.degrees import Degrees
from evenspan.topology.from_config import solve_degrees
from evenspan.topology.mesh import Topology, build_topology
from evenspan.train.build import build_schedule
from evenspan.train.step import accumulate_gradients
from evenspan.train.text import TextTask

GLOBAL_BATCH = 4
WORDS = "the span of a bridge is what carries its load evenly from one bank to the other . "


def write_corpus(folder: Path) -> Path:
    """Documents of very different lengths, so that samples hold several borders."""
    folder.mkdir()
    for number, length in enumerate((3, 40, 11, 300, 1, 95, 26, 7, 180, 60)):
        (folder / f"{number}.txt").write_text((WORDS * 9)[number : number + length], encoding="utf-8")
    return folder


def text_config(
    corpus: Path, mesh: dict[str, int], *, sequence_parallel: bool = False, **changes: Any
) -> TextRunConfig:
    """A nano decoder in fp64 whose global batch is the same at any degrees."""
    model = changes.pop("model", {})
    parallel = {"mesh": {"shard": 1, **{k: v for k, v in mesh.items() if k != "context"}}}
    parallel["backend_kwargs"] = {"sequence_parallel": sequence_parallel}
    batch = GLOBAL_BATCH // (mesh.get("shard", 1) * mesh.get("replicate", 1))
    micro = changes.pop("micro_batches", 1)
    return TextRunConfig.model_validate(
        {
            "task": "text",
            "model_kwargs": {"model_name": "Qwen3-nano", "overrides": model},
            "sequence_parallel_size": mesh.get("context", 1),
            "parallel": {
                "mixed_precision": "fp64",
                "padding": changes.pop("padding", "error"),
                "activation_checkpointing": changes.pop("checkpointing", "none"),
                **parallel,
            },
            "training": {"batch_size": batch // micro, "gradient_accumulation_steps": micro},
            "data": {
                "data_path": str(corpus),
                "pattern": "*.txt",
                "sequence_length": 32,
                "prefetch": 0,
                **changes,
            },
            "logging": {"tensorboard": False},
        }
    )


def step_gradients(config: TextRunConfig, topology: Topology) -> tuple[float, dict[str, Tensor], nn.Module]:
    """The loss of step 0, every gradient in full, and the model."""
    task = TextTask(config, topology.degrees)
    model = task.build_model(topology)
    schedule = build_schedule(config, size=len(task.dataset), dp_degree=topology.degrees.dp)
    assert schedule.global_batch == GLOBAL_BATCH
    loader = MicroBatchLoader(
        task.dataset,
        collate=task.collate,
        schedule=schedule,
        frames=task.layout.share(topology.coordinates.context),
        dp_rank=topology.coordinates.dp,
        dp_degree=topology.degrees.dp,
        micro_batches=config.training.gradient_accumulation_steps,
    )
    loss, _ = accumulate_gradients(
        model,
        list(loader.step(0)),
        task.build_objective(topology),
        step=0,
        loss_group=topology.loss_group,
    )
    complete_gradients(model)
    gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    return loss.item(), gradients, model


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def alone() -> Topology:
    """One process, whatever the world is."""
    return Topology(
        degrees=Degrees(replicate=1, shard=1, context=1, tensor=1),
        mesh=None,
        device=torch.device("cpu"),
        fsdp_mesh=None,
        tensor_mesh=None,
        loss_group=None,
        dp_group=None,
    )


def parities(ctx: RankContext, corpus: Path, cases: list[tuple[dict, dict]]) -> list[dict[str, float]]:
    """Relative errors of the loss and of every gradient, per case."""
    found = []
    for mesh, changes in cases:
        config = text_config(corpus, mesh, **changes)
        one = {key: value for key, value in changes.items() if key in ("model", "sequence_length")}
        want_loss, want, _ = step_gradients(text_config(corpus, {}, **one), alone())
        topology = build_topology(solve_degrees(config, world_size=ctx.world_size), device=ctx.device)
        loss, got, _ = step_gradients(config, topology)
        assert got.keys() == want.keys()
        errors = {name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want}
        found.append({"loss": abs(loss - want_loss) / want_loss, **errors})
    return found
