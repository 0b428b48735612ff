"""The attention pattern of a clip whose frames are spread over context ranks."""

from __future__ import annotations

from evenspan.attention.patterns import block_causal, teacher_forcing
from evenspan.attention.spans import SpanTable
from evenspan.topology.layout import FrameLayout


def clip_pattern(
    layout: FrameLayout, *, teacher_forced: bool, causal: bool, window: int | None, sink: int
) -> SpanTable:
    """Who attends whom, in frames over all ranks, in the order in which the exchange delivers them.

    With `teacher_forced` every rank holds [clean | noisy] of its frames; without it, its frames once, and
    without `causal` the whole clip is one block. `window` and `sink` are those of `patterns`. Padded frames
    attend nothing and are attended by nothing.
    """
    shares = [(share.start, share.stop) for share in layout.shares]
    if teacher_forced:
        return teacher_forcing(
            shares,
            frame_per_block=layout.frame_per_block,
            valid_frames=layout.frames,
            window=window,
            sink=sink,
        )
    return block_causal(
        layout.padded_frames,
        frame_per_block=layout.frame_per_block if causal else layout.padded_frames,
        window=window,
        sink=sink,
        shares=shares,
        valid_frames=layout.frames,
    )
