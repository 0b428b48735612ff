"""The directory of one run: whose it is, and where its files lie."""

from __future__ import annotations

import difflib
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from evenspan.config.load import as_yaml, load_config
from evenspan.config.tasks import AnyRunConfig
from evenspan.errors import ConfigError, RunError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
# Settings, with all below them, that a resumed run may change: they say how the work is spread, what is
# reported, or how long it goes on, not what is computed. `batch_size` and `gradient_accumulation_steps` may
# because degrees may; their product with dp may not, which `run.resume` sees.
RESUMABLE = (
    "sequence_parallel_size",
    "parallel.mesh",
    "parallel.padding",
    "parallel.activation_checkpointing",
    "parallel.attention",
    "parallel.backend_kwargs",
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "training.max_iters",
    "training.fingerprint_interval",
    "data.prefetch",
    "evaluation",
    "checkpoints",
    "logging.interval",
    "logging.tensorboard",
)


class RunDir:
    """Paths inside a run directory, and the refusal to mix two runs in one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / CONFIG_FILE
        self.metrics = root / METRICS_FILE
        self.checkpoints = root / "checkpoints"
        self.samples = root / "samples"
        self.tensorboard = root / "tensorboard"
        self._release = ExitStack()
        self._held = False

    def claim(self, config: AnyRunConfig) -> None:
        """Create the directory for `config`, or accept one that already belongs to it.

        Raises RunError R101 when another configuration's run lies there, R102 when something else does
        (nothing is overwritten), R107 when the directory cannot be made or written, and R111 when a process
        trains in it right now. It stays claimed until `release` or the end of the process.
        """
        try:
            self._claim(config)
            self._hold()
        except OSError as error:
            raise RunError(
                "R107",
                f"{self.root} cannot be a run directory: {error.strerror}",
                hint="give as --logdir a directory that may be written, or the name of a new one",
            ) from None

    def release(self) -> None:
        """Let other processes claim the directory."""
        self._release.close()
        self._held = False

    def _hold(self) -> None:
        """Lock the directory itself; the system lets go of it when this process ends, however it ends."""
        if self._held:
            return
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunError(
                "R111",
                f"another process trains in {self.root}",
                hint="wait for it or end it, or give another --logdir",
            ) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return
        self._held = True
        self._release.callback(os.close, descriptor)

    def _claim(self, config: AnyRunConfig) -> None:
        if self.config.exists():
            self._refuse_other_run(config)
        elif self.root.exists() and any(self.root.iterdir()):
            raise RunError(
                "R102",
                f"{self.root} is not empty and holds no {CONFIG_FILE}, so it is no run of this program",
                hint="choose an empty or new --logdir",
            )
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.config.exists():
            partial = self.config.with_suffix(".partial")
            partial.write_text(as_yaml(config), encoding="ascii")
            partial.replace(self.config)

    def _refuse_other_run(self, config: AnyRunConfig) -> None:
        try:
            before = _identity(load_config(self.config, overrides=[]))
        except ConfigError as error:
            raise RunError(
                "R102",
                f"{self.root} is no run of this version: {error.findings[0].at}: {error.findings[0].fact}",
                hint="choose an empty or new --logdir",
            ) from None
        now = _identity(config)
        if before == now:
            return
        changed = [
            line
            for line in difflib.unified_diff(before, now, lineterm="", n=0)
            if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        raise RunError(
            "R101",
            f"{self.root} holds a run of another configuration: {'; '.join(changed)}",
            hint="give a new --logdir, or the settings of the run that lies there",
        )


def _identity(config: AnyRunConfig) -> list[str]:
    """The configuration's lines that decide what is computed, as dotted keys."""
    lines: list[str] = []
    settings = config.model_dump(mode="json")
    # Its first number is training.batch_size again, which may change.
    if "image_or_video_shape" in settings:
        settings["image_or_video_shape"] = settings["image_or_video_shape"][1:]
    _flatten(settings, "", lines)
    # A cosine ends at max_iters, so another end is another curve from the first step on.
    kept = () if config.training.min_lr_ratio == 1 else ("training.max_iters",)
    return [line for line in lines if (key := line.split("=", 1)[0]) in kept or not _may_change(key)]


def _may_change(key: str) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in RESUMABLE)


def _flatten(value: object, prefix: str, lines: list[str]) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _flatten(child, f"{prefix}.{key}" if prefix else key, lines)
        return
    lines.append(f"{prefix}={value}")
