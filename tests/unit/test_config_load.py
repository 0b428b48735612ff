"""Reading configurations: every spelling, every mistake at once, and files that are never executed."""

from pathlib import Path

import pytest

from evenspan.config.load import as_yaml, load_config, read_config
from evenspan.config.schema import RunConfig
from evenspan.errors import ConfigError

BASE = "image_or_video_shape: [1, 96, 48, 44, 80]\ndata: {data_path: data/demo}\n"


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


def findings(path: Path, *overrides: str) -> list[tuple[str, str]]:
    return [(finding.code, finding.at) for finding in read_config(path, overrides=overrides).findings]


def test_defaults_and_shape(write) -> None:
    config = load_config(write(BASE))
    assert config.image_or_video_shape == (1, 96, 48, 44, 80)
    assert (config.frames, config.channels, config.latent_height, config.latent_width) == (96, 48, 44, 80)
    assert config.model_kwargs.model_name == "Wan2.2-TI2V-5B"
    assert config.parallel.mesh.shard == -1


def test_written_yaml_reads_back_equal(write) -> None:
    config = load_config(
        write(BASE), overrides=["model_kwargs.overrides={num_layers: 2, patch_size: [1, 2, 2]}", "lr=3e-4"]
    )
    assert load_config(write(as_yaml(config), "again.yaml")) == config


def test_the_grouped_the_flat_and_the_canonical_form_are_equal(write) -> None:
    grouped = """
model: {name: wan-tiny, num_frame_per_block: 8, kwargs: {sink_size: 8}}
infra: {sequence_parallel_size: 4, sharding_strategy: hybrid_zero2, mixed_precision: true,
        gradient_checkpointing: true}
training: {lr: 1.0e-4, log_iters: 15, max_checkpoints: 10}
data: {data_path: x, image_or_video_shape: [1, 96, 48, 44, 80], load_raw_video: false}
inference: {sampling_steps: 50, guidance_scale: 3.0, multi_shot_sink: false}
evaluation: {interval: 5}
logging: {seed: 7}
"""
    flat = """
model_name: wan-tiny
num_frame_per_block: 8
model_kwargs: {sink_size: 8}
sequence_parallel_size: 4
sharding_strategy: hybrid_zero2
mixed_precision: true
gradient_checkpointing: true
lr: 1.0e-4
log_iters: 15
max_checkpoints: 10
data_path: x
image_or_video_shape: [1, 96, 48, 44, 80]
load_raw_video: false
sampling_steps: 50
guidance_scale: 3.0
generate_interval: 5
seed: 7
"""
    canonical = """
model_kwargs: {model_name: wan-tiny, sink_size: 8}
num_frame_per_block: 8
sequence_parallel_size: 4
image_or_video_shape: [1, 96, 48, 44, 80]
parallel:
  mixed_precision: bf16
  activation_checkpointing: full
  mesh: {replicate: 1, shard: -1}
  backend_kwargs: {fsdp2: {reshard_after_forward: false}}
training: {lr: 1.0e-4}
data: {data_path: x, kind: latents}
evaluation: {interval: 5, sampling_steps: 50, guidance_scale: 3.0}
checkpoints: {interval: 15, max_checkpoints: 10}
logging: {seed: 7}
"""
    expected = load_config(write(canonical))
    assert load_config(write(grouped)) == expected
    assert load_config(write(flat)) == expected


def test_unknown_keys_at_every_level_name_the_nearest(write) -> None:
    path = write(BASE + "trainig: {lr: 1}\nparallel: {mesh: {tensr: 2, replicate: 1}, padding: auto}\n")
    reading = read_config(path, overrides=["parallel.backend_kwargs.fsdp2.reshard=false"])
    hints = {finding.at: finding.hint for finding in reading.findings}
    assert {finding.code for finding in reading.findings} == {"C001"}
    assert "training" in hints["trainig"]
    assert "parallel.mesh.tensor" in hints["parallel.mesh.tensr"]
    assert "reshard_after_forward" in hints["parallel.backend_kwargs.fsdp2.reshard"]
    assert reading.config is not None
    assert reading.config.parallel.padding == "auto"


def test_a_setting_in_the_wrong_group_is_found_by_its_name(write) -> None:
    (finding,) = read_config(write(BASE + "algorithm: {lr: 1}\n")).findings
    assert "training.lr" in finding.hint


def test_all_mistakes_are_reported_together(write) -> None:
    path = write(
        "lr: fast\ntrainer: score_distillation\nwandb_host: x\nimage_or_video_shape: [1, 96]\n"
        "sequence_parallel_size: true\nparallel: {mesh: {sequence: 2, shard: 0.5}}\nevaluation: 3\n"
    )
    assert set(findings(path, "nonsense", "training.max_iters=0")) == {
        ("C007", "nonsense"),
        ("C002", "lr"),
        ("C008", "trainer"),
        ("C008", "wandb_host"),
        ("C002", "image_or_video_shape"),
        ("C002", "sequence_parallel_size"),
        ("T104", "parallel.mesh.sequence"),
        ("C002", "parallel.mesh.shard"),
        ("C002", "evaluation"),
        ("C003", "training.max_iters"),
        ("C009", "data.data_path"),
    }
    with pytest.raises(ConfigError, match="11 configuration errors") as caught:
        load_config(path, overrides=["nonsense", "training.max_iters=0"])
    assert caught.value.exit_code == 2


def test_mesh_sequence_says_which_two_settings_exist(write) -> None:
    (finding,) = read_config(write(BASE + "parallel: {mesh: {sequence: 4}}\n")).findings
    assert finding.code == "T104"
    for setting in (
        "sequence_parallel_size: 4",
        "parallel.mesh.context: 4",
        "parallel.mesh.tensor: 4",
        "parallel.backend_kwargs.sequence_parallel: true",
    ):
        assert setting in finding.hint


def test_contradictions_name_both_places(write) -> None:
    path = write(
        BASE + "sequence_parallel_size: 2\nparallel: {mesh: {context: 4}}\nlr: 1\ntraining: {lr: 2}\n"
    )
    found = read_config(path).findings
    assert [finding.code for finding in found] == ["C004", "C004"]
    assert "sequence_parallel_size=2" in found[0].fact
    assert found[0].at == "parallel.mesh.context"
    assert "lr=1" in found[1].fact


def test_equal_double_definitions_are_no_contradiction(write) -> None:
    path = write(BASE + "sequence_parallel_size: 2\nparallel: {mesh: {context: 2}}\n")
    assert load_config(path).sequence_parallel_size == 2


def test_the_command_line_wins_under_any_spelling(write) -> None:
    path = write(BASE + "infra: {sequence_parallel_size: 2}\ntraining: {lr: 1.0}\n")
    config = load_config(path, overrides=["sequence_parallel_size=4", "lr=2", "lr=3"])
    assert config.sequence_parallel_size == 4
    assert config.training.lr == 3


def test_overrides_are_typed_as_yaml(write) -> None:
    config = load_config(
        write(BASE),
        overrides=[
            "image_or_video_shape=[1, 64, 48, 44, 80]",
            "algorithm.i2v=true",
            "training.lr=1e-4",
            "data.data_path=a=b",
            "parallel.mesh={replicate: 2, shard: 1}",
            "evaluation.prompts=[one, two]",
            "model_kwargs.overrides.num_layers=3",
        ],
    )
    assert config.frames == 64
    assert config.algorithm.i2v is True
    assert config.training.lr == 1e-4
    assert config.data.data_path == "a=b"
    assert config.parallel.mesh.replicate == 2
    assert config.evaluation.prompts == ["one", "two"]
    assert config.model_kwargs.overrides == {"num_layers": 3}


@pytest.mark.parametrize("override", ["lr", "=3", "lr=[1", "lr=${nowhere}"])
def test_unreadable_overrides(write, override: str) -> None:
    assert findings(write(BASE), override) == [("C007", override)]


def test_a_literal_python_file_is_read(write) -> None:
    path = write(
        '"""Docs."""\nimage_or_video_shape: list = (1, 96, 48, 44, 80)\ndata = {"data_path": "x"}\n'
        "training = {'lr': 1e-3, 'weight_decay': +0.0}\nlogging = {'tensorboard': False}\n",
        "run.py",
    )
    config = load_config(path)
    assert config.frames == 96
    assert config.training.lr == 1e-3
    assert config.logging.tensorboard is False


def test_a_python_file_is_never_executed(write, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = write(
        f"import os\nopen({str(mark)!r}, 'w')\nlr = os.cpu_count()\nx.y = 3\na, b = 1, 2\n", "run.py"
    )
    found = read_config(path).findings
    assert [finding.code for finding in found] == ["C006"] * 5
    assert [finding.at.rsplit(":", 1)[1] for finding in found] == ["1", "2", "3", "4", "5"]
    assert not mark.exists()


def test_python_files_name_double_assignments_and_syntax_errors(write) -> None:
    assert findings(path := write("lr = 1\nlr = 2\n", "a.py")) == [("C004", f"{path}:2")]
    assert findings(path := write("lr = (\n", "b.py")) == [("C006", f"{path}:1")]


def test_unreadable_files(write, tmp_path: Path) -> None:
    assert findings(tmp_path / "none.yaml") == [("C005", str(tmp_path / "none.yaml"))]
    for name, text in (
        ("a.yaml", "a: [1"),
        ("b.yaml", "- 1"),
        ("c.yaml", "a: ${b}"),
        ("d.yaml", "a: 1\na: 2"),
    ):
        path = write(text, name)
        assert findings(path) == [("C005", str(path))], text
    assert findings(tmp_path)[0][0] == "C005"


REFUSED = (
    "infra.vae_halo_latents training.gc_interval training.error_recycling.enabled vae_halo_latents "
    "inference.multi_shot_rope_offset logging.wandb_project negative_prompt data.eval_data_path "
    "infra.generator_fsdp_wrap_strategy all_causal no_save inference.sink_size"
)


@pytest.mark.parametrize("key", REFUSED.split())
def test_longlive_settings_without_counterpart_are_refused_by_name(write, key: str) -> None:
    (finding,) = read_config(write(BASE), overrides=[f"{key}=8"]).findings
    assert (finding.code, finding.at) == ("C008", key)
    assert finding.hint


def test_values_of_longlive_settings_that_mean_nothing_here(write) -> None:
    assert findings(write(BASE), "infra.sharding_strategy=shard_grad_op") == [
        ("C008", "infra.sharding_strategy")
    ]
    assert findings(write(BASE), "infra.mixed_precision=1") == [("C008", "infra.mixed_precision")]


def test_the_schema_is_closed_and_frozen() -> None:
    config = RunConfig.model_validate({"image_or_video_shape": [1, 1, 1, 2, 2], "data": {"data_path": "x"}})
    with pytest.raises(ValueError, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        RunConfig.model_validate({**config.model_dump(), "x": 1})
    with pytest.raises(ValueError, match="one setting"):
        RunConfig.model_validate({**config.model_dump(), "parallel": {"mesh": {"context": 3}}})


@pytest.mark.parametrize(
    "name", ["configs/wan_ti2v_5B.py", "configs/train_ar.yaml", "recipes/wan_ar/configs/tiny.yaml"]
)
def test_shipped_configurations_load(name: str) -> None:
    root = Path(__file__).parents[2]
    load_config(root / name)


def test_both_shipped_5b_configurations_are_the_same_run() -> None:
    root = Path(__file__).parents[2] / "configs"
    assert load_config(root / "wan_ti2v_5B.py") == load_config(root / "train_ar.yaml")


def test_longlives_independent_first_frame_is_what_i2v_does(tmp_path):
    path = tmp_path / "run.yaml"
    text = "image_or_video_shape: [1, 8, 48, 16, 16]\ndata: {data_path: somewhere}\nalgorithm: {%s}\n"
    for written, i2v in (("independent_first_frame: true", True), ("independent_first_frame: false", False)):
        path.write_text(text % written)
        assert load_config(path).algorithm.i2v is i2v
    path.write_text(text % "i2v: false, independent_first_frame: true")
    assert [finding.code for finding in read_config(path).findings] == ["C004"]
