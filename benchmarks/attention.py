"""Teacher-forcing attention, forward + backward, on the CPU: masked SDPA, unmasked SDPA, segments.

Prints a table last. `python benchmarks/attention.py --threads 2 --lengths 2048 4096 8192 --repeats 3`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from evenspan.attention.dense import dense_mask
from evenspan.attention.patterns import teacher_forcing
from evenspan.attention.segments import attend_segments
from evenspan.attention.spans import SpanTable

FRAMES = 32
FRAME_PER_BLOCK = 4


@dataclass(frozen=True)
class Timing:
    """Wall times of one method, in milliseconds."""

    min_ms: float
    median_ms: float


def table_of(tokens: int, *, ranks: int) -> SpanTable:
    """Teacher forcing over `tokens` = 2 x frames x tokens per frame, with the frames shared by `ranks`."""
    share = FRAMES // ranks
    shares = [(rank * share, (rank + 1) * share) for rank in range(ranks)]
    frames = teacher_forcing(shares, frame_per_block=FRAME_PER_BLOCK)
    return frames.scaled(tokens // (2 * FRAMES))


def measure(
    methods: dict[str, Callable[[], Tensor]], inputs: list[Tensor], *, repeats: int
) -> dict[str, Timing]:
    """Times of every method; rounds are interleaved so that a busy machine slows all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for round_index in range(repeats + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            out = method()
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            if round_index:  # the first round warms caches up
                samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing(min(ms), statistics.median(ms)) for name, ms in samples.items()}


def compare(tokens: int, *, heads: int, head_dim: int, ranks: int, repeats: int) -> list[str]:
    """The rows of the table for one length."""
    table = table_of(tokens, ranks=ranks)
    shape = (1, tokens, heads, head_dim)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    q, k, v = inputs
    mask = dense_mask(table)

    def sdpa(attn_mask: Tensor | None) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, attn_mask=attn_mask).transpose(1, 2)

    methods = {
        "masked SDPA": lambda: sdpa(mask),
        "unmasked SDPA": lambda: sdpa(None),
        "segments": lambda: attend_segments(q, k, v, table),
    }
    times = measure(methods, inputs, repeats=repeats)
    faster = times["masked SDPA"].min_ms / times["segments"].min_ms
    cost = times["segments"].min_ms / (table.density * times["unmasked SDPA"].min_ms)
    rows = [f"{tokens:7d} {name:14s} {t.min_ms:9.1f} {t.median_ms:9.1f}" for name, t in times.items()]
    return [
        *rows,
        f"{tokens:7d} density {table.density:.3f}: {faster:.2f}x masked, {cost:.2f} x density x unmasked",
    ]


def main() -> None:
    """Runs the lengths and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1, help="layout of this many context ranks")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[str] = []
    for tokens in args.lengths:
        rows += compare(
            tokens, heads=args.heads, head_dim=args.head_dim, ranks=args.ranks, repeats=max(3, args.repeats)
        )
    print(f"fp32, batch 1, {args.heads} heads x {args.head_dim}, {args.threads} threads, ranks {args.ranks}")
    print(f"{'tokens':>7} {'method':14} {'min ms':>9} {'median ms':>9}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
