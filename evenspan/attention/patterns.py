"""Attention patterns as span tables, in frames or in tokens, whatever the caller counts in.

Frame patterns become token patterns by `SpanTable.scaled(tokens_per_frame)`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evenspan.attention.spans import Span, SpanTable, TokenRange, merge_ranges
from evenspan.errors import AttentionError


def full(q_tokens: int, k_tokens: int | None = None) -> SpanTable:
    """Every query sees every key; `k_tokens` defaults to `q_tokens`."""
    keys = q_tokens if k_tokens is None else k_tokens
    _require_counts(q_tokens=q_tokens, k_tokens=keys)
    spans = (Span(0, q_tokens, 0, keys),) if q_tokens and keys else ()
    return SpanTable(spans, q_tokens, keys)


def causal(tokens: int, *, window: int | None = None, sink: int = 0) -> SpanTable:
    """Query i sees keys j <= i with `i - j < window` (itself included), and of the others the first `sink`.

    Without a window it is one causal span. With one, every row is a span or two, since its left edge moves
    by one key per query.
    """
    _require_counts(tokens=tokens, sink=sink)
    _require_window(window)
    if not tokens:
        return SpanTable((), 0, 0)
    if window is None or window >= tokens:
        return SpanTable((Span(0, tokens, 0, tokens, True),), tokens, tokens)
    spans = [
        Span(i, i + 1, *keys)
        for i in range(tokens)
        for keys in merge_ranges([TokenRange(0, min(sink, i + 1)), TokenRange(max(0, i + 1 - window), i + 1)])
    ]
    return SpanTable(tuple(spans), tokens, tokens).merged()


def documents(lengths: Sequence[int], *, causal: bool = True) -> SpanTable:
    """Documents of `lengths` tokens packed one after the other; each sees only itself."""
    spans = []
    start = 0
    for length in lengths:
        _require_counts(length=length)
        if length:
            spans.append(Span(start, start + length, start, start + length, causal))
        start += length
    return SpanTable(tuple(spans), start, start)


def block_causal(
    frames: int,
    *,
    frame_per_block: int,
    window: int | None = None,
    sink: int = 0,
    shares: Sequence[tuple[int, int]] | None = None,
    valid_frames: int | None = None,
) -> SpanTable:
    """Frames see the blocks up to their own: block = frame // frame_per_block.

    window: a query of block b sees, before its block, only the last `window` frames (those at or after
    `b * frame_per_block - window`); its own block is always visible. sink: the first `sink` frames stay
    visible to every later block. shares: the contiguous global frame ranges of the ranks, in order (the
    order of tokens after the exchange is that of the frames, so they are only checked). valid_frames:
    frames at or after it are padding, which attends to nothing and is attended by nothing.
    """
    _require_counts(frames=frames, sink=sink)
    _require_window(window)
    _require_block(frame_per_block)
    valid = _valid(frames, valid_frames)
    if shares is not None:
        _require_partition(shares, frames)
    spans = [
        Span(own.start, own.stop, *keys)
        for own in _blocks(valid, frame_per_block)
        for keys in merge_ranges([*_past(own.start, window, sink), own])
    ]
    return SpanTable(tuple(spans), frames, frames).merged()


def teacher_forcing(
    shares: Sequence[tuple[int, int]],
    *,
    frame_per_block: int,
    valid_frames: int | None = None,
    window: int | None = None,
    sink: int = 0,
) -> SpanTable:
    """Clean context and noisy targets of one clip, natural layout: ranks hold [clean share | noisy share].

    shares: the contiguous ranges [start, stop) of global frames of the ranks, in order; together they are all
    (padded) frames 0 .. F. The table has 2F units in the order c_0 n_0 c_1 n_1 ... Block borders may lie
    inside a share or straddle ranks. With block = frame // frame_per_block:

    - a clean query sees the clean frames of its own block and of all earlier ones;
    - a noisy query sees the clean frames of all earlier blocks and the noisy frames of its own block (the
      whole block, also the part on another rank), nothing else.

    window: limits the earlier blocks to the last `window` frames before the start of the query's block: the
    frame f of an earlier block is visible iff `f >= block * frame_per_block - window` or f < sink. The own
    block (clean for clean queries, noisy for noisy ones) is always visible and does not count towards the
    window, so the clean and the noisy copy of a block see the same context. valid_frames: frames at or
    after it are padding: they attend to nothing and nothing attends to them.

    Raises AttentionError A103 when the shares are no contiguous partition, or a size is out of range.
    """
    frames = _require_partition(shares, None)
    _require_counts(sink=sink)
    _require_window(window)
    _require_block(frame_per_block)
    spans = []
    for own in _blocks(_valid(frames, valid_frames), frame_per_block):
        past = _past(own.start, window, sink)
        clean = _positions(shares, merge_ranges([*past, own]), noisy=False)
        own_noisy = _positions(shares, (own,), noisy=True)
        noisy = merge_ranges([*_positions(shares, past, noisy=False), *own_noisy])
        spans += [Span(*q, *k) for q in _positions(shares, (own,), noisy=False) for k in clean]
        spans += [Span(*q, *k) for q in own_noisy for k in noisy]
    return SpanTable(tuple(spans), 2 * frames, 2 * frames).merged()


def _blocks(frames: int, frame_per_block: int) -> Iterator[TokenRange]:
    for start in range(0, frames, frame_per_block):
        yield TokenRange(start, min(start + frame_per_block, frames))


def _past(start: int, window: int | None, sink: int) -> tuple[TokenRange, ...]:
    """The frames before a block's `start` that its queries see."""
    first = 0 if window is None else max(0, start - window)
    return merge_ranges([TokenRange(0, min(sink, start)), TokenRange(first, start)])


def _positions(
    shares: Sequence[tuple[int, int]], frames: Sequence[TokenRange], *, noisy: bool
) -> tuple[TokenRange, ...]:
    """Where the clean or noisy copies of global `frames` lie in the order c_0 n_0 c_1 n_1 ..."""
    placed = []
    for start, stop in shares:
        # 2 * start units lie on earlier ranks; the noisy copies follow this rank's stop - start clean ones.
        shift = stop if noisy else start
        placed += [TokenRange(max(a, start) + shift, min(b, stop) + shift) for a, b in frames]
    return merge_ranges(placed)


def _valid(frames: int, valid_frames: int | None) -> int:
    if valid_frames is None:
        return frames
    if not 0 <= valid_frames <= frames:
        raise AttentionError(
            "A103",
            f"valid_frames={valid_frames} does not lie in 0 .. {frames}, the padded number of frames",
            hint="pass the number of frames before padding",
        )
    return valid_frames


def _require_partition(shares: Sequence[tuple[int, int]], frames: int | None) -> int:
    """The number of frames of contiguous shares that start at 0 (and end at `frames` when it is given)."""
    end = 0
    for start, stop in shares:
        if start != end or stop < start:
            raise AttentionError(
                "A103",
                f"share ({start}, {stop}) does not continue the shares before it, which end at frame {end}",
                hint="give every rank's [start, stop) in rank order, each starting where the last stopped",
            )
        end = stop
    if frames is not None and end != frames:
        raise AttentionError(
            "A103", f"the shares end at frame {end}, not at frames={frames}", hint="cover every padded frame"
        )
    return end


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise AttentionError("A103", f"{name}={value} is negative", hint=f"pass {name} >= 0")


def _require_window(window: int | None) -> None:
    if window is not None and window < 0:
        raise AttentionError("A103", f"window={window} is negative", hint="pass None for no window")


def _require_block(frame_per_block: int) -> None:
    if frame_per_block < 1:
        raise AttentionError(
            "A103", f"frame_per_block={frame_per_block} is not a positive count", hint="pass 1 or more frames"
        )
