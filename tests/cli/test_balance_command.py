"""`evenspan balance`: the table, its JSON form, and its exit codes."""

import json
from pathlib import Path

import pytest

from evenspan.cli.app import main

CONFIG = """
model_kwargs: {model_name: wan-tiny}
image_or_video_shape: [1, 9, 48, 16, 16]
num_frame_per_block: 2
sequence_parallel_size: 2
parallel: {padding: auto}
data: {data_path: nowhere}
"""
QUANTITIES = ["frames", "tokens", "loss_tokens", "attention_pairs", "exchanged_bytes"]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)


def test_json_has_one_object_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "run.yaml", "--world-size", "4", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [list(rank) for rank in report["ranks"]] == [QUANTITIES] * 4
    assert list(report["max_over_mean"]) == QUANTITIES
    assert [rank["frames"] for rank in report["ranks"]] == [5, 4, 5, 4]


def test_text_has_one_line_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "run.yaml", "--world-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rank", "0", "1", "max/mean"]


def test_a_file_takes_the_form_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "run.yaml", "--world-size", "2", "--out", "work.json"]) == 0
    assert main(["balance", "run.yaml", "--world-size", "2", "--out", "work.txt"]) == 0
    assert capsys.readouterr().out == "wrote work.json\nwrote work.txt\n"
    assert len(json.loads(Path("work.json").read_text())["ranks"]) == 2
    assert Path("work.txt").read_text().split()[0] == "rank"


@pytest.mark.parametrize(
    "arguments", [["--world-size", "3"], ["--world-size", "2", "--out", "work.html"], []], ids=" ".join
)
def test_a_wrong_layout_or_file_type_is_2(arguments: list[str]) -> None:
    assert main(["balance", "run.yaml", *arguments]) == 2
