"""What a run tells while it goes: a progress bar or log lines, metrics.jsonl, TensorBoard events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from evenspan.errors import RunError
from evenspan.train.run_dir import RunDir

logger = logging.getLogger("evenspan")


class Reporter:
    """Writes the metrics of global rank 0; every other rank makes no Reporter.

    Lines of metrics.jsonl are objects with `step` (optimizer steps completed) and named numbers; a line whose
    `kind` is not `train` holds facts of another kind (`layout`, `evaluation`).
    """

    def __init__(
        self, run_dir: RunDir, *, total_steps: int, start_step: int, interval: int, tensorboard: bool
    ) -> None:
        with _named_faults(run_dir.root):
            _drop_lines_after(run_dir.metrics, start_step)
            self._metrics = run_dir.metrics.open("a", encoding="ascii")
            self._writer = (
                SummaryWriter(str(run_dir.tensorboard), purge_step=start_step + 1) if tensorboard else None
            )
        self._root = run_dir.root
        self._interval = interval
        self._total_steps = total_steps
        self._start_step = start_step
        self._started = time.monotonic()
        self._bar = _progress_bar(Console())
        self._task = (
            self._bar.add_task("train", total=total_steps, completed=start_step, facts="")
            if self._bar
            else None
        )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        self._metrics.close()
        if self._writer:
            self._writer.close()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record one optimizer step."""
        self.record("train", step, numbers)
        done = step - self._start_step
        seconds_per_step = (time.monotonic() - self._started) / done
        eta = timedelta(seconds=round(seconds_per_step * (self._total_steps - step)))
        facts = (
            f"loss {numbers['loss']:.4f}  norm {numbers['grad_norm']:.3f}  "
            f"{numbers['tokens_per_s']:,.0f} tokens/s"
        )
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif step % self._interval == 0 or step == self._total_steps:
            logger.info("step %d/%d  %s  eta %s", step, self._total_steps, facts, eta)

    def record(self, kind: str, step: int, facts: Mapping[str, object]) -> None:
        """Append one line to metrics.jsonl and its numbers to TensorBoard."""
        with _named_faults(self._root):
            self._metrics.write(json.dumps({"kind": kind, "step": step, **facts}) + "\n")
            self._metrics.flush()
            if self._writer:
                numbers = {name: fact for name, fact in facts.items() if isinstance(fact, int | float)}
                for name, value in numbers.items():
                    self._writer.add_scalar(f"{kind}/{name}", value, step)


@contextmanager
def _named_faults(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            "R107",
            f"the metrics in {root} cannot be written: {error.strerror}",
            hint="free space or fix the directory and start again: the run resumes from the last checkpoint",
        ) from error


def _progress_bar(console: Console) -> Progress | None:
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _drop_lines_after(path: Path, step: int) -> None:
    """Forget metrics of steps that a resumed run will do again, so that each step stands once.

    A line that is no record (torn by a crash) is dropped as well.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and 0 <= _step_of(line) <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="ascii")
    partial.replace(path)


def _step_of(line: str) -> int:
    """The step a line of metrics is about, or -1 when it is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return -1
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else -1
