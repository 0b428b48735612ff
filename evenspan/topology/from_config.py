"""The degrees and the frame layout that a configuration asks for."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.topology.degrees import Degrees
from evenspan.topology.layout import FrameLayout


def solve_degrees(config: RunConfig, *, world_size: int, context: int | None = None) -> Degrees:
    """The degree of every mesh axis for `world_size` ranks; `context` stands in for sequence_parallel_size.

    Raises TopologyError T102, T103.
    """
    mesh = config.parallel.mesh
    return Degrees.solve(
        replicate=mesh.replicate,
        shard=mesh.shard,
        context=config.sequence_parallel_size if context is None else context,
        tensor=mesh.tensor,
        world_size=world_size,
    )


def frame_layout(config: RunConfig) -> FrameLayout:
    """Which context rank owns which latent frames. Raises ShapeError S201."""
    return FrameLayout(
        frames=config.frames,
        frame_per_block=config.num_frame_per_block,
        context=config.sequence_parallel_size,
        padding=config.parallel.padding == "auto",
    )
