"""Which head counts can be exchanged between which numbers of ranks: arithmetic only, no torch."""

from __future__ import annotations

from evenspan.errors import CommError
from evenspan.topology.degrees import divisors


def check_heads(heads: int, *, kv_heads: int | None = None, ranks: int) -> None:
    """Raises X101 when `ranks` do not divide the query heads, X102 when KV heads fit neither way."""
    if heads % ranks:
        raise CommError(
            "X101",
            f"{heads} query heads cannot be shared by {ranks} context ranks",
            hint=f"use sequence_parallel_size in {divisors(heads)}",
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        legal = [count for count in divisors(heads) if kv_heads % count == 0 or count % kv_heads == 0]
        raise CommError(
            "X102",
            f"{kv_heads} key/value heads cannot be shared by {ranks} context ranks: neither number divides "
            "the other",
            hint=f"use sequence_parallel_size in {legal}",
        )


def exchanged_heads(heads: int, *, kv_heads: int, ranks: int) -> int:
    """Heads that travel per token in one exchange of q, k and v: KV heads are copied up to one per rank."""
    return heads + 2 * max(kv_heads, ranks)
