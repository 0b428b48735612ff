"""A guard against ranks of one context group reading different samples, which trains on nonsense silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from evenspan.errors import CommError


@dataclass(frozen=True, slots=True)
class _Reading:
    rank: int
    digest: bytes
    sample_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} read samples {list(self.sample_ids)} ({self.digest.hex()[:12] or 'empty'})"


def compare_fingerprints(
    digest: bytes, *, group: dist.ProcessGroup | None, sample_ids: Sequence[int]
) -> None:
    """Returns when every rank of `group` gives the same digest and sample ids; None is a group of one.

    `digest` identifies the content of the whole batch, not of this rank's share. A collective: every rank
    calls it, and every rank raises X201, naming global ranks and what each of them read.
    """
    if group is None:
        return
    mine = _Reading(dist.get_rank(), digest, tuple(sample_ids))
    readings: list[_Reading | None] = [None] * group.size()
    dist.all_gather_object(readings, mine, group=group)
    found = [reading for reading in readings if reading is not None]
    counts = Counter((reading.digest, reading.sample_ids) for reading in found)
    if len(counts) == 1:
        return
    usual, _ = counts.most_common(1)[0]
    odd = [reading.rank for reading in found if (reading.digest, reading.sample_ids) != usual]
    raise CommError(
        "X201",
        f"ranks {[reading.rank for reading in found]} share one sequence but read different content: "
        + "; ".join(str(reading) for reading in found),
        hint=f"give samplers the dp rank and dp degree, not the global rank; look at ranks {odd} first",
    )
