"""How many collectives ran and how many bytes each rank sent to others, while a meter is active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """Calls of one kind of collective and the bytes this rank sent to other ranks (not to itself)."""

    calls: int = 0
    bytes_sent: int = 0


class CommMeter:
    """Counts evenspan's collectives inside `with CommMeter() as meter:`; costs nothing when none is active.

    `meter.traffic[(kind, group)]` holds calls and bytes; kinds are `exchange`, `all_gather`,
    `reduce_scatter`, `all_reduce`; the group is its description (`mesh_context`) or its name. A backward
    counts into the meter that was active in its forward, on whichever thread autograd runs it. FSDP2's own
    collectives are torch's and are not counted.
    """

    def __init__(self) -> None:
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self._token: Token[CommMeter | None] | None = None

    def __enter__(self) -> CommMeter:
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _ACTIVE.reset(self._token)
        self._token = None

    def calls(self, kind: str | None = None) -> int:
        """Collectives of one kind, or of all."""
        return sum(entry.calls for (name, _), entry in self.traffic.items() if kind in (None, name))

    def bytes_sent(self, kind: str | None = None) -> int:
        """Bytes this rank sent to others in collectives of one kind, or of all."""
        return sum(entry.bytes_sent for (name, _), entry in self.traffic.items() if kind in (None, name))

    def reset(self) -> None:
        """Forgets what was counted."""
        self.traffic.clear()


_ACTIVE: ContextVar[CommMeter | None] = ContextVar("evenspan_comm_meter", default=None)


def active_meter() -> CommMeter | None:
    """The meter that counts here and now, if any."""
    return _ACTIVE.get()


@contextmanager
def counting_into(meter: CommMeter | None) -> Iterator[None]:
    """Makes `meter` the active one: autograd's threads do not inherit the forward's context."""
    token = _ACTIVE.set(meter)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def record(kind: str, *, group: dist.ProcessGroup, bytes_sent: int) -> None:
    """Counts one collective into the active meter."""
    meter = _ACTIVE.get()
    if meter is None:
        return
    entry = meter.traffic.setdefault((kind, group.group_desc or group.group_name), Traffic())
    entry.calls += 1
    entry.bytes_sent += bytes_sent


def size_in_bytes(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()
