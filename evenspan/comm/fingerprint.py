"""Guards against ranks that read the wrong samples, which trains on nonsense silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from evenspan.errors import CommError
from evenspan.topology.data_dims import DP_DIMS, split_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _Reading:
    rank: int
    digest: bytes
    sample_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} read samples {list(self.sample_ids)} ({self.digest.hex()[:12] or 'empty'})"


def compare_fingerprints(
    digest: bytes, *, groups: Sequence[dist.ProcessGroup | None], sample_ids: Sequence[int]
) -> None:
    """Returns when all ranks that `groups` connect give the same digest and sample ids.

    `groups` are this rank's groups along the axes that share samples (context, tensor), in the same order on
    every rank; None is a group of one. `digest` identifies the content of the whole batch, not of this rank's
    share. A collective: every rank calls it, and every rank of a block that differs raises X201, naming
    global ranks and what each of them read.
    """
    found = _gather(digest, groups=groups, sample_ids=sample_ids)
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


class IdentityGuard:
    """Checks of a loader of one's own, on the mesh and `dp_dims` of its `DataSlots`. Every rank calls them.

    A digest comes from `evenspan.data.content.content_fingerprint(batch)`, before the batch is split.
    """

    def __init__(self, mesh: DeviceMesh, dp_dims: Sequence[str] = DP_DIMS) -> None:
        """Raises TopologyError T121, T122 or T123, as `DataSlots` does."""
        different, shared = split_dims(mesh, dp_dims)
        self._shared = [mesh.get_group(name) for name in shared]
        self._different = [mesh.get_group(name) for name in different]

    def same(self, digest: bytes, *, sample_ids: Sequence[int]) -> None:
        """Raises X201 when ranks that differ on no dp dimension read different content."""
        compare_fingerprints(digest, groups=self._shared, sample_ids=sample_ids)

    def disjoint(self, sample_ids: Sequence[int]) -> None:
        """Raises X202 when two dp ranks read one sample in this batch.

        A data set smaller than the global batch repeats samples rightly: do not ask it then.
        """
        found = _gather(b"", groups=self._different, sample_ids=sample_ids)
        readers: dict[int, list[int]] = {}
        for reading in found:
            for sample in dict.fromkeys(reading.sample_ids):
                readers.setdefault(sample, []).append(reading.rank)
        twice = {sample: ranks for sample, ranks in readers.items() if len(ranks) > 1}
        if not twice:
            return
        first = list(twice.items())[:4]
        raise CommError(
            "X202",
            f"{len(twice)} {'sample was' if len(twice) == 1 else 'samples were'} read by several dp ranks: "
            + "; ".join(f"sample {sample} by ranks {ranks}" for sample, ranks in first),
            hint="feed the loader from DataSlots(mesh, dp_dims).sampler, or from its rank and degree",
        )


def _gather(
    digest: bytes, *, groups: Sequence[dist.ProcessGroup | None], sample_ids: Sequence[int]
) -> list[_Reading]:
    """What every rank that `groups` connect read, by rank.

    Axis after axis, and judged only at the end: a rank that raised between two axes would leave the ranks of
    its other axis waiting.
    """
    found = [_Reading(dist.get_rank() if dist.is_initialized() else 0, digest, tuple(sample_ids))]
    for group in groups:
        if group is None or group.size() == 1:
            continue
        parts: list[list[_Reading] | None] = [None] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = [reading for part in parts for reading in part or ()]
    return sorted(found, key=lambda reading: reading.rank)
