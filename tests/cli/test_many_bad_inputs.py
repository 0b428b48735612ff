"""A long list of what people and programs type by mistake: every command names it, none shows a traceback."""

from __future__ import annotations

import re
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
CODE = re.compile(r"\b[A-Z]\d{3}\b")
OVERRIDES = [
    "x",
    "=",
    "=3",
    "..=1",
    ".a=1",
    "a.=1",
    "a..b=1",
    "training.lr",
    "training.lr==",
    "training.lr=abc",
    "training.lr=[1]",
    "training.lr={}",
    "training.lr=true",
    "training.lr=null",
    "training=3",
    "training=[]",
    "training.lr.x=3",
    "data.data_path=null",
    "data.data_path=3",
    "data.data_path=[a]",
    "image_or_video_shape=",
    "image_or_video_shape=[]",
    "image_or_video_shape=[1,2]",
    "image_or_video_shape=1,8,48,16,16",
    "image_or_video_shape=[1,8,48,16,1.5]",
    "image_or_video_shape=[1,8,48,16,-16]",
    "image_or_video_shape=[1,8,48,16,0]",
    "image_or_video_shape=[1,8,48,16,true]",
    "image_or_video_shape={a:1}",
    "image_or_video_shape.1=9",
    "image_or_video_shape[1]=9",
    "sequence_parallel_size=0",
    "sequence_parallel_size=-2",
    "sequence_parallel_size=2.0",
    "sequence_parallel_size=two",
    "sequence_parallel_size=auto",
    "parallel.mesh.sequence=2",
    "parallel.mesh.shard=0",
    "parallel.mesh=2",
    "parallel.padding=yes",
    "parallel.attention=flash",
    "parallel.mixed_precision=fp16",
    "parallel.activation_checkpointing=true",
    "model_kwargs.model_name=",
    "model_kwargs.model_name=wan-tinny",
    "model_kwargs.model_name=null",
    "model_kwargs.overrides.num_layers=-1",
    "model_kwargs.overrides.num_layers=two",
    "model_kwargs.overrides.patch_size=[1,2]",
    "model_kwargs.overrides.patch_size=[0,0,0]",
    "model_kwargs.overrides=3",
    "model_kwargs.overrides.foo=1",
    "model_kwargs.local_attn_size=-2",
    "model_kwargs.sink_size=-1",
    "algorithm.num_train_timestep=0",
    "algorithm.noise_augmentation_max_timestep=5000",
    "training.warmup_steps=700",
    "training.beta1=1",
    "training.ema_weight=2",
    "training.max_iters=0",
    "data.kind=images",
    "data.codec.spatial=3",
    "data.codec.temporal=100000",
    "data.codec.name=vae",
    "data.text.length=0",
    "data.fps=0",
    "data.min_latent_frames=3",
    "evaluation.prompts=abc",
    "evaluation.prompts=[1]",
    "evaluation.num_frames=-1",
    "evaluation.sampling_steps=0",
    "checkpoints.max_checkpoints=-1",
    "logging.seed=-1",
    "logging.seed=1.5",
    "training.lr=${nope}",
    "training.lr=???",
    "num_frame_per_block=3",
    "num_frame_per_block=0",
    "training.gradient_accumulation_steps=0",
    "trainer=score_distillation",
]
FILES = {
    "list.yaml": "- 1\n- 2\n",
    "tab.yaml": "a:\n\t- b",
    "binary.yaml": "\x00\x01",
    "anchor.yaml": "a: &a [*a]\n",
    "tag.yaml": 'a: !!python/object/apply:os.system ["ls"]\n',
    "interpolated.yaml": CONFIG + 'logging: {seed: "${data.nope}"}\n',
    "section.yaml": CONFIG + "training: fast\n",
    "number-key.yaml": CONFIG + "1: 2\n",
    "null-key.yaml": CONFIG + "null: 2\n",
    "list-key.yaml": CONFIG + "? [a, b]\n: 2\n",
    "date.yaml": CONFIG + "logging: {seed: 2020-01-01}\n",
    "two.yaml": CONFIG + "---\na: 1\n",
    "deep.yaml": "a: " + "[" * 2000 + "]" * 2000,
    "run.json": '{"a": 1}',
    "noext": "a: 1",
    "call.py": 'import os\nos.system("ls")',
    "class.py": "class A: pass",
    "tuple.py": "a, b = 1, 2",
    "bytes.py": 'data_path = b"x"',
    "complex.py": "sequence_parallel_size = 1j",
}
WORDS = [
    ["explain", ""],
    ["explain", "S9999"],
    ["explain", "../S201"],
    ["explain", "*"],
    ["balance", "run.yaml", "--world-size", "0"],
    ["balance", "run.yaml", "--world-size", "x"],
    ["balance", "run.yaml", "--world-size", "3"],
    ["balance", "run.yaml", "--world-size", "2", "--out", "x.pdf"],
    ["check", "nofile.yaml"],
    ["check", "data"],
    ["check", "run.yaml/x.yaml"],
    ["check", "\x00.yaml"],
    ["check", "run.yaml", "extra.yaml"],
    ["data", "demo", ""],
    ["data", "demo", "run.yaml"],
    ["sample", "nope"],
    ["sample", "run.yaml"],
    ["sample", "data", "--out", "x.webm"],
    ["sample", "data", "--seed", "-1"],
    ["sample", "broken"],
    ["train", "--config", "run.yaml", "--nproc", "0"],
    ["train", "--config", "run.yaml", "--nproc", "3"],
    ["train", "--config", "run.yaml", "--sequence_parallel_size", "x"],
    ["train", "--config", "run.yaml", "--image_or_video_shape", "[1,2"],
    ["train", "--config", "run.yaml", "--num_frame_per_block", ""],
    ["train", "--config", "nofile.yaml"],
    ["nope"],
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("video", "caption"):
        (tmp_path / "data" / "demo" / folder / "walk").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("[")
    (tmp_path / "run.yaml").write_text(CONFIG)


def assert_named(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Exit code 1 or 2, with a code or the usage, and nothing written."""
    before = sorted(Path().rglob("*"))
    assert main(words) in (1, 2)
    said = "".join(capsys.readouterr())
    assert CODE.search(said) or "Usage" in said, said
    assert "Traceback" not in said
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides(capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert_named(capsys, ["check", "run.yaml", override, "--world-size", "2"])
    assert_named(capsys, ["balance", "run.yaml", override, "--world-size", "2"])
    assert_named(capsys, ["train", "--config", "run.yaml", override])


@pytest.mark.parametrize("name", FILES)
def test_files(capsys: pytest.CaptureFixture[str], name: str) -> None:
    Path(name).write_text(FILES[name])
    assert_named(capsys, ["check", name])
    assert_named(capsys, ["balance", name, "--world-size", "2"])
    assert_named(capsys, ["train", "--config", name])


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_command_lines(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert_named(capsys, words)
