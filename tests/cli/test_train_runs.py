"""Training as users start it, on local ranks, torchrun and mpirun; and how it ends when someone ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evenspan.data.latents_dataset import write_latents
from evenspan.errors import CheckpointError, ConfigError, RunError
from evenspan.train.checkpoint import list_checkpoints
from evenspan.train.sample import sample_run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
model_kwargs:
  model_name: wan-nano
  overrides: {{in_channels: 12, out_channels: 12}}
sequence_parallel_size: 2
num_frame_per_block: 2
image_or_video_shape: [1, 8, 12, 8, 8]
data:
  data_path: {data}
  kind: latents
  text: {{length: 4}}
  codec: {{spatial: 2}}
training: {{max_iters: 3, lr: 0.001}}
evaluation: {{sampling_steps: 2}}
checkpoints: {{interval: 2}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    for sample in range(4):
        write_latents(
            directory / f"{sample}.safetensors",
            latents_FCHW=torch.randn(8, 12, 8, 8),
            text_NLE=torch.randn(1, 4, 16),
            prompt_of_frame_F=torch.zeros(8, dtype=torch.long),
        )
    path = directory / "small.yaml"
    path.write_text(CONFIG.format(data=directory))
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*words: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def losses(logdir: Path) -> list[float]:
    lines = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two local ranks."""
    logdir = tmp_path_factory.mktemp("runs") / "local"
    done = run("-m", "evenspan", "train", "--config", config, "--nproc", "2", "--logdir", logdir)
    assert done.returncode == 0, done.stderr
    assert "[SP] Sequence Parallel enabled, sp_size=2, dp_size=1, world_size=2" in done.stdout
    assert "rank 1 holds frames [4, 8], local shape [1, 4, 12, 8, 8]" in done.stdout
    return logdir


def test_local_ranks_leave_a_whole_run(finished: Path) -> None:
    assert len(losses(finished)) == 3
    assert [path.name for path in list_checkpoints(finished / "checkpoints")] == [
        "step_00000002",
        "step_00000003",
    ]
    assert list((finished / "tensorboard").glob("events*"))
    assert not list((finished / "checkpoints").glob(".partial*"))


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_sample_writes_a_clip(finished: Path, tmp_path: Path, suffix: str) -> None:
    out = sample_run(finished, out=tmp_path / f"clip{suffix}")
    assert out.stat().st_size > 100


def test_sample_refuses_what_it_cannot_do(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="R105"):
        sample_run(finished, out=tmp_path / "clip.webm")
    with pytest.raises(RunError, match="R108"):
        sample_run(finished, out=tmp_path / "clip.gif", overrides=["num_frame_per_block=4"])
    with pytest.raises(ConfigError, match="S203"):
        sample_run(finished, out=tmp_path / "clip.gif", overrides=["evaluation.num_frames=2000"])
    with pytest.raises(RunError, match="R106"):
        sample_run(tmp_path, out=tmp_path / "clip.gif")
    with pytest.raises(RunError, match="R108"):
        sample_run(finished, out=tmp_path / "clip.gif", overrides=["model_kwargs.overrides.num_layers=1"])
    with pytest.raises(ConfigError, match="S203"):
        sample_run(finished, out=tmp_path / "clip.gif", overrides=["evaluation.num_frames=2000"])
    assert not list(tmp_path.iterdir())
    shutil.copy(finished / "config.yaml", tmp_path)
    with pytest.raises(CheckpointError, match="K103"):
        sample_run(tmp_path, out=tmp_path / "clip.gif")


def test_torchrun(config: Path, finished: Path, tmp_path: Path) -> None:
    done = run(
        "-m", "torch.distributed.run", "--nproc_per_node=4", "train.py", "--config", config, "--logdir",
        tmp_path / "run", "--sequence_parallel_size", "4", "num_frame_per_block=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sp_size=4, dp_size=1, world_size=4" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: install openmpi-bin")
def test_mpirun(config: Path, finished: Path, tmp_path: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    done = subprocess.run(
        [
            *mpirun,
            *command(
                "train.py", "--config", config, "--logdir", tmp_path / "run", "sequence_parallel_size=4"
            ),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)


def test_a_finished_run_leaves_no_thread_of_its_groups(config: Path, tmp_path: Path) -> None:
    """A gloo thread that wakes while the interpreter shuts down ends the process with SIGABRT."""
    done = run(
        "-m", "torch.distributed.run", "--nproc_per_node=2", "tests/distributed/leave_threads.py", config,
        tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left: []") == 2, done.stdout


@pytest.mark.parametrize(("how", "waited"), [("store", 2), ("barrier", 0)])
def test_ranks_wait_for_rank_0_longer_than_a_collective_does(how: str, waited: int) -> None:
    """An evaluation of a large model takes longer than any collective should; a barrier fails there."""
    done = run("-m", "torch.distributed.run", "--nproc_per_node=2", "tests/distributed/long_wait.py", how)
    assert done.stdout.count("waited: True") == waited, done.stderr
    assert (done.returncode == 0) is (how == "store")


@pytest.mark.slow
def test_thirty_runs_in_a_row_end_with_zero(config: Path, tmp_path: Path) -> None:
    for number in range(30):
        words = ("--config", config, "--nproc", "2", "--logdir", tmp_path / str(number))
        done = run("-m", "evenspan", "train", *words, "training.max_iters=1")
        assert done.returncode == 0, (number, done.stderr)


def test_an_error_of_all_ranks_is_told_once(config: Path, finished: Path) -> None:
    words = ("--config", config, "--logdir", finished, "training.lr=0.7")
    for start in (
        ("-m", "evenspan", "train", "--nproc", "2"),
        ("-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"),
    ):
        done = run(*start, *words)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("error: R101") == 1, done.stderr
        assert done.stderr.count("training.lr=0.7") == 1, done.stderr


def start_endless(config: Path, logdir: Path) -> subprocess.Popen[str]:
    """Two local ranks that would train for hours; returns once they have a checkpoint."""
    words = ("-m", "evenspan", "train", "--config", config, "--nproc", "2", "--logdir", logdir)
    process = subprocess.Popen(
        command(*words, "training.max_iters=100000", "checkpoints.interval=5"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list_checkpoints(logdir / "checkpoints"):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "no checkpoint after two minutes"
        time.sleep(0.2)
    return process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks: the launcher's children that run `evenspan train`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat[1]) == process.pid and b"evenspan" in words:
            found.append(int(entry.name))
    return sorted(found)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"left behind: {pids}"
        time.sleep(0.2)


def assert_complete(logdir: Path, out: Path) -> None:
    """What bears a checkpoint's name is a checkpoint, and the newest can be read."""
    found = list_checkpoints(logdir / "checkpoints")
    assert found
    assert sorted((logdir / "checkpoints").glob("step_*")) == found
    sample_run(logdir, out=out)


def test_a_killed_rank_ends_the_run_by_name(config: Path, tmp_path: Path) -> None:
    process = start_endless(config, tmp_path / "run")
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1, stderr
    assert "R104" in stderr
    assert "SIGKILL" in stderr
    assert stderr.count("error: X210 another rank of this run has ended") == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert_gone(ranks)
    assert_complete(tmp_path / "run", tmp_path / "clip.gif")


def test_ctrl_c_ends_the_run_quietly(config: Path, tmp_path: Path) -> None:
    process = start_endless(config, tmp_path / "run")
    ranks = ranks_of(process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=90)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr, stderr
    assert_gone(ranks)
    assert_complete(tmp_path / "run", tmp_path / "clip.gif")
