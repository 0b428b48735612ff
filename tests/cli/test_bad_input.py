"""Input nobody should write: each command names the fault, ends with 1 or 2, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenspan.cli.app import main

CONFIG = """
model_kwargs: {model_name: wan-tiny}
image_or_video_shape: [1, 8, 48, 16, 16]
num_frame_per_block: 2
sequence_parallel_size: 2
data: {data_path: data/demo}
"""


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("video", "caption"):
        (tmp_path / "data" / "demo" / folder / "walk").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(CONFIG)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", *words])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("number.yaml", "3", "C005 number.yaml: holds a str"),
        ("digits.yaml", "logging: {seed: " + "9" * 5000 + "}", "C005 digits.yaml: is not readable as YAML"),
        ("minus.py", "a = " + "-" * 20000 + "1", "C006 minus.py: is not Python: nested too deeply"),
        ("nested.py", "a = " + "-" * 2000 + "1", "C006 nested.py"),
        ("null.py", "a = '\0'", "C006 null.py: is not Python"),
    ],
)
def test_unreadable_files_are_2(
    capsys: pytest.CaptureFixture[str], name: str, text: str, expected: str
) -> None:
    Path(name).write_text(text)
    code, out = check(capsys, name)
    assert code == 2
    assert expected in out


def test_a_number_without_end_is_no_override(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, "run.yaml", "logging.seed=" + "9" * 5000)
    assert code == 2
    assert "C007" in out


@pytest.mark.parametrize("value", [".nan", ".inf", "1e400"])
@pytest.mark.parametrize(
    "setting",
    [
        "training.lr",
        "training.weight_decay",
        "training.max_grad_norm",
        "training.min_lr_ratio",
        "data.fps",
        "evaluation.guidance_scale",
        "model_kwargs.timestep_shift",
    ],
)
def test_numbers_are_finite(capsys: pytest.CaptureFixture[str], setting: str, value: str) -> None:
    code, out = check(capsys, "run.yaml", f"{setting}={value}")
    assert code == 1
    assert out.startswith("1 configuration error:\nC003")


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_model_fields_are_finite(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert check(capsys, "run.yaml", f"model_kwargs.overrides.eps={value}")[0] == 1


@pytest.mark.parametrize(
    "override",
    [
        "logging.seed=99999999999999999999",
        "sequence_parallel_size=99999999999999999999",
        "num_frame_per_block=99999999999999999999",
        "image_or_video_shape=[1,99999999999999999999,48,16,16]",
        "image_or_video_shape=[1,2147483647,48,16,16]",
        "model_kwargs.overrides.num_attention_heads=99999999999999999999",
        "model_kwargs.overrides.num_attention_heads=2147483647",
        "data.prefetch=1025",
        "algorithm.num_train_timestep=1000001",
        "data.prefetch=-1",
        "data.fps=1001",
    ],
)
def test_huge_numbers_are_named_at_once(capsys: pytest.CaptureFixture[str], override: str) -> None:
    code, out = check(capsys, "run.yaml", override, "--world-size", "2")
    assert code == 1
    assert override.split("=")[1].strip("[]").split(",")[-4 if "[" in override else 0] in out


@pytest.mark.parametrize(
    "words",
    [
        ["check", "run.yaml", "--world-size", "99999999999"],
        ["balance", "run.yaml", "--world-size", "99999999999"],
        ["train", "--config", "run.yaml", "--nproc", "100000"],
    ],
)
def test_more_ranks_than_any_machine_are_a_usage_error(words: list[str]) -> None:
    assert main(words) == 2


@pytest.mark.parametrize("kind", ["video", "latents"])
def test_a_path_too_long_does_not_exist(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out = check(capsys, "run.yaml", f"data.data_path={'a' * 5000}", f"data.kind={kind}")
    assert code == 1
    assert "D401" in out
    assert "File name too long" in out


@pytest.mark.parametrize("out", ["missing/work.txt", "folder.json", "run.yaml/work.txt", "a" * 300 + ".txt"])
def test_balance_names_what_it_cannot_write(capsys: pytest.CaptureFixture[str], out: str) -> None:
    Path("folder.json").mkdir()
    before = sorted(Path().rglob("*"))
    assert main(["balance", "run.yaml", "--world-size", "2", "--out", out]) == 1
    assert "R107" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("target", ["run.yaml/demo", "a" * 300, "/proc/demo"])
def test_demo_names_what_it_cannot_write(capsys: pytest.CaptureFixture[str], target: str) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["data", "demo", target]) == 1
    assert "D603" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("value", ["{}", "{peak: 1}"])
def test_a_group_where_a_number_belongs_is_a_wrong_value(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    code, out = check(capsys, "run.yaml", f"training.lr={value}")
    assert code == 1
    assert out.startswith("1 configuration error:\nC002 training.lr")


def test_a_key_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("escape.yaml").write_text(CONFIG + '"\\e[31mred": 1\n')
    code, out = check(capsys, "escape.yaml")
    assert code == 1
    assert r"C001 \x1b[31mred" in out
    assert "\x1b" not in out
