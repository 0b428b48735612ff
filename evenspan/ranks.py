"""Persistent ranks on this machine: spawned once, then given many functions to run together.

Spawning costs seconds (every rank imports torch), so a pool lives for a whole proof or test session. Ranks
are processes on the gloo backend, deterministic, one thread each.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evenspan.errors import ConfigError, EvenspanError

if TYPE_CHECKING:
    import torch

GROUP_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits in a collective for the others before it fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """What a function run by a pool is told about its rank."""

    rank: int
    world_size: int
    device: torch.device


class RankFailure(AssertionError):  # noqa: N818  pytest shows an assertion, which a failing rank is
    """One or more ranks raised, died or hung; the message holds every rank's traceback."""

    def __init__(self, report: str, named: Sequence[EvenspanError] = ()) -> None:
        super().__init__(report)
        self.named = tuple(named)
        """The named errors among what they raised, by rank."""


class RankPool:
    """`world_size` gloo ranks on this machine, started on the first run and kept until `close`.

    With `warnings_as_errors` a Python warning ends a rank, as a test suite wants it.
    """

    def __init__(self, world_size: int, *, warnings_as_errors: bool = True) -> None:
        self.world_size = world_size
        self._warnings_as_errors = warnings_as_errors
        self._ranks: list[tuple[SpawnProcess, Connection]] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """The results of `function(context, *args)` on every rank, in rank order.

        `function` is defined at the top of an importable module; arguments and results are pickled. When
        a rank raises, dies or exceeds `timeout` (s), all ranks are killed, RankFailure shows each one's
        traceback, and the next run starts new ranks.
        """
        __tracebackhide__ = True  # pytest: the ranks' tracebacks say where it failed, this frame does not
        self.start()
        task = pickle.dumps((function, args))
        try:
            for _, connection in self._ranks:
                connection.send_bytes(task)
        except OSError:
            self.close()
            raise
        replies = self._collect(time.monotonic() + timeout)
        failed = [rank for rank in range(self.world_size) if rank not in replies or not replies[rank][0]]
        if failed:
            report = self._report(replies, failed, timeout)
            named = [error for rank in failed if rank in replies and (error := _named(replies[rank][1]))]
            self.close()
            raise RankFailure(report, named)
        return [pickle.loads(replies[rank][1]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends every rank."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []
        if self._store is not None:
            self._store.cleanup()
            self._store = None

    def start(self) -> None:
        """Start the ranks that are not there yet; returns while they still load torch."""
        if self._ranks:
            return
        spawn = multiprocessing.get_context("spawn")
        self._store = tempfile.TemporaryDirectory(prefix="evenspan-ranks-")
        store = Path(self._store.name) / "store"
        for rank in range(self.world_size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve,
                args=(rank, self.world_size, str(store), theirs, self._warnings_as_errors),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, deadline: float) -> dict[int, tuple[bool, bytes]]:
        """Each rank's reply; returns early once one failed and the others had a moment to fail too."""
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        replies: dict[int, tuple[bool, bytes]] = {}
        while waiting and time.monotonic() < deadline:
            for ready in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                rank = waiting.pop(ready)
                with suppress(EOFError, ConnectionResetError):
                    replies[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                if rank not in replies or not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2.0)
        return replies

    def _report(self, replies: dict[int, tuple[bool, bytes]], failed: list[int], timeout: float) -> str:
        lines = [f"{len(failed)} of {self.world_size} ranks failed"]
        for rank in failed:
            if rank in replies:
                lines.append(f"--- rank {rank}\n{pickle.loads(replies[rank][1])[0]}")
                continue
            exit_code = self._ranks[rank][0].exitcode
            state = f"ended with exit code {exit_code}" if exit_code is not None else "gave no answer"
            lines.append(f"--- rank {rank} {state} (limit {timeout:g} s, or 2 s after another's failure)")
        return "\n".join(lines)


def make_deterministic() -> None:
    """One thread, deterministic algorithms, fixed seed: the same numbers on every run of this process."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)


def _serve(rank: int, world_size: int, store: str, connection: Connection, strict: bool) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error" if strict else "default")
    warnings.filterwarnings("ignore", message=".*The given NumPy array is not writable.*")
    make_deterministic()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
    context = RankContext(rank=rank, world_size=world_size, device=torch.device("cpu"))
    with suppress(EOFError), _Reporter(connection):
        while True:
            function, args = pickle.loads(connection.recv_bytes())
            torch.manual_seed(0)
            connection.send_bytes(pickle.dumps((True, pickle.dumps(function(context, *args)))))


def _named(reply: bytes) -> EvenspanError | None:
    """The named error that a rank raised, made again here."""
    _, fields = pickle.loads(reply)
    if fields is None:
        return None
    kind, code, fact, hint = fields
    return kind(code, fact, hint=hint)


class _Reporter:
    """Sends the traceback of whatever ends a rank, which then ends: its pool is about to be killed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if kind is None or error is None or issubclass(kind, EOFError):
            return False
        text = "".join(traceback.format_exception(error))
        fields = None
        if isinstance(error, EvenspanError) and not isinstance(error, ConfigError):
            fields = (type(error), error.code, error.fact, error.hint)
        self._connection.send_bytes(pickle.dumps((False, pickle.dumps((text, fields)))))
        return True
