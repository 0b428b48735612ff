"""Exit codes and output of the commands that need no rank: check, explain, and train before it starts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenspan.cli.app import main

ROOT = Path(__file__).parents[2]
LEGAL = """
model_kwargs: {model_name: wan-tiny}
image_or_video_shape: [1, 8, 48, 16, 16]
num_frame_per_block: 2
sequence_parallel_size: 2
data: {data_path: data/demo}
"""
SEED_FLAGS = ["--sequence_parallel_size", "4", "--num_frame_per_block", "8"]
SEED_SHAPE = ["--image_or_video_shape", "[1, 81, 4, 256, 256]"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for folder in ("video", "caption"):
        (tmp_path / "data" / "demo" / folder / "walk").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(LEGAL)


def test_clean_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--world-size", "4"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_findings_are_1_and_all_listed(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["sequence_parallel_size=3", "training.lrr=1", "image_or_video_shape=[1,8,48,15,16]"]
    assert main(["check", "run.yaml", "--world-size", "4", *overrides]) == 1
    out = capsys.readouterr().out
    assert out.startswith("5 configuration errors:\n")
    assert [line[:4] for line in out.splitlines()[1::2]] == ["C001", "T103", "S201", "S204", "M301"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": [], "passed": True}
    assert main(["check", "run.yaml", "--format", "json", "sequence_parallel_size=8"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False
    assert [sorted(finding) for finding in result["findings"]] == [["at", "code", "fact", "hint"]] * 2
    assert [finding["code"] for finding in result["findings"]] == ["S201", "M301"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "none.yaml"],
        ["check", "run.yaml", "nonsense"],
        ["check"],
        ["check", "run.yaml", "--world-size", "0"],
        ["check", "run.yaml", "--format", "xml"],
        ["chekc"],
        ["explain", "Z999"],
        ["train"],
        ["train", "--config", "none.yaml"],
        ["train", "--config", "run.yaml", "--nproc", "3"],
        ["train", "--config", "run.yaml"],
        ["balance", "none.yaml", "--world-size", "2"],
    ],
    ids=" ".join,
)
def test_usage_and_configuration_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "".join(capsys.readouterr())


def test_explain_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "S201"]) == 0
    assert capsys.readouterr().out.startswith("# S201 frames-fill-ranks-and-blocks\n")


def test_help_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("train", "check", "explain", "balance", "sample", "data"):
        assert command in out
        assert main([command, "--help"]) == 0


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evenspan.cli.check_cmd.check_file", interrupted)
    assert main(["check", "run.yaml"]) == 130


def test_an_error_of_ours_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("evenspan.cli.check_cmd.check_file", broken)
    with pytest.raises(ZeroDivisionError):
        main(["check", "run.yaml"])


def set_launcher(monkeypatch: pytest.MonkeyPatch, *, rank: int, world_size: int) -> None:
    values = (rank, world_size, rank, "127.0.0.1", 29500)
    for name, value in zip(LAUNCHER_VARIABLES, values, strict=True):
        monkeypatch.setenv(name, str(value))


def test_nproc_under_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_launcher(monkeypatch, rank=0, world_size=2)
    assert main(["train", "--config", "run.yaml", "--nproc", "2"]) == 2
    assert "T113" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_only_rank_0_tells_the_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, speaks: bool
) -> None:
    set_launcher(monkeypatch, rank=rank, world_size=3)
    waits: list[float] = []
    monkeypatch.setattr("evenspan.cli.app.time.sleep", waits.append)
    assert main(["train", "--config", "run.yaml"]) == 2
    assert bool(capsys.readouterr().err) is speaks
    assert bool(waits) is not speaks, "a rank that fails first would have the launcher stop rank 0 unheard"


def test_half_a_launcher_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--config", "run.yaml"]) == 2
    assert "T110" in capsys.readouterr().err


def seed_command(rank: int) -> subprocess.CompletedProcess[str]:
    launcher = {
        "RANK": str(rank),
        "WORLD_SIZE": "8",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    command = [sys.executable, "train.py", "--config", "configs/wan_ti2v_5B.py", *SEED_FLAGS, *SEED_SHAPE]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **launcher},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_seeds_command_lists_every_wrong_value_once_and_quickly() -> None:
    before = time.monotonic()
    first, last = seed_command(0), seed_command(7)
    seconds = time.monotonic() - before
    assert (first.returncode, last.returncode) == (2, 2)
    assert first.stderr.startswith("error: 3 configuration errors:\n")
    for part in (
        "81 latent frames",
        "64 or 96 frames",
        "4 latent channels",
        "48",
        "'data/videos' does not exist",
    ):
        assert part in first.stderr
    assert last.stdout + last.stderr == ""
    assert seconds < 10, "two processes of well under a second each, on a busy machine"
