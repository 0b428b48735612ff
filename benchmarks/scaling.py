"""Strong scaling of one training step: 2 context ranks x 1 thread against 1 process x 2 threads. Table last.

    python -m benchmarks.scaling [--steps N]

Both sides do the same global work (same clip, same model, same objective) on the same two cores, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.activations import clip, config_at
from evenspan.data.batch import split_video_batch
from evenspan.testing import RankContext, RankPool
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.mesh import build_topology
from evenspan.train.build import build_model, model_config
from evenspan.train.objective import build_objective
from evenspan.train.optimizer import build_optimizer
from evenspan.train.step import train_step


def step_seconds(ctx: RankContext, context: int, threads: int, steps: int) -> list[float]:
    """Wall seconds of each optimizer step on this rank, the first (warm-up) left out."""
    torch.set_num_threads(threads)
    config = config_at(context, "none")
    degrees = solve_degrees(config, world_size=ctx.world_size)
    topology = build_topology(degrees, device=torch.device("cpu"))
    layout = frame_layout(config)
    model = build_model(config, topology)
    optimizer = build_optimizer(model.parameters(), config.training)
    batch = split_video_batch(
        clip(model_config(config).text_dim), layout=layout, context_rank=topology.coordinates.context
    )
    objective = build_objective(config, layout, seed=0)
    seconds = []
    for step in range(steps + 1):
        started = time.perf_counter()
        train_step(
            model,
            optimizer,
            [batch],
            objective,
            step=step,
            max_grad_norm=1.0,
            loss_group=topology.loss_group,
        )
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def main() -> None:
    """Alternate the two sides, then print min and median of each and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    one, two = RankPool(1), RankPool(2)
    alone: list[float] = []
    together: list[float] = []
    for _ in range(2):
        alone += one.run(step_seconds, 1, 2, steps, timeout=300)[0]
        together += [
            max(ranks) for ranks in zip(*two.run(step_seconds, 2, 1, steps, timeout=300), strict=True)
        ]
    one.close()
    two.close()
    print(f"{'layout':<26}{'min s':>9}{'median s':>10}")
    print(f"{'1 process x 2 threads':<26}{min(alone):>9.3f}{statistics.median(alone):>10.3f}")
    print(f"{'2 context ranks x 1 thread':<26}{min(together):>9.3f}{statistics.median(together):>10.3f}")
    ratio = statistics.median(together) / statistics.median(alone)
    print(f"{'ratio of medians':<26}{min(together) / min(alone):>9.3f}{ratio:>10.3f}")


if __name__ == "__main__":
    main()
