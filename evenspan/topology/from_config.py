"""The degrees and the frame layout that a configuration asks for."""

from __future__ import annotations

from math import gcd

from evenspan.config.schema import RunConfig
from evenspan.config.tasks import AnyRunConfig
from evenspan.config.text_schema import TextRunConfig
from evenspan.topology.degrees import Degrees
from evenspan.topology.layout import FrameLayout, sequence_layout


def solve_degrees(config: AnyRunConfig, *, world_size: int, context: int | None = None) -> Degrees:
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


def frame_layout(config: RunConfig, *, tensor: int = 1) -> FrameLayout:
    """Which context rank owns which latent frames, at tensor degree `tensor`. Raises ShapeError S201.

    Sequence parallelism on the tensor axis cuts a rank's tokens again, at whole frames, as each frame has its
    own modulation: clean and noisy copies together must be a multiple of `tensor`.
    """
    copies = 2 if config.algorithm.teacher_forcing else 1
    cut_again = config.parallel.backend_kwargs.sequence_parallel
    return FrameLayout(
        frames=config.frames,
        frame_per_block=config.num_frame_per_block,
        context=config.sequence_parallel_size,
        padding=config.parallel.padding == "auto",
        multiple=tensor // gcd(tensor, copies) if cut_again else 1,
    )


def token_layout(config: TextRunConfig, degrees: Degrees) -> FrameLayout:
    """Which context rank owns which tokens of a sample; its "frames" are tokens. Raises ShapeError S201.

    With tensor-mesh sequence parallelism each share is split again, over the tensor ranks.
    """
    return sequence_layout(
        config.data.sequence_length,
        context=degrees.context,
        tensor=degrees.tensor if config.parallel.backend_kwargs.sequence_parallel else 1,
        padding=config.parallel.padding == "auto",
    )
