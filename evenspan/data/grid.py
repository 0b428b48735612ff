"""The frame grid of a clip: latent frame 0 is raw frame 0, later latent frames are `temporal` raw frames
each.
"""

from __future__ import annotations


def raw_frames(frames: int, *, temporal: int) -> int:
    """Raw frames of a clip of `frames` latent frames: 1 + t(F - 1)."""
    return 1 + temporal * (frames - 1) if frames else 0
