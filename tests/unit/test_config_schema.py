"""Every setting says what it is, and the spelling tables only lead to settings that exist."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from evenspan.config import mvp_engine, spellings
from evenspan.config.load import as_yaml, load_config, read_config
from evenspan.config.schema import RunConfig
from evenspan.config.spellings import spellings_of
from evenspan.config.tasks import SCHEMAS, video_config
from evenspan.config.text_schema import TextRunConfig
from evenspan.errors import ConfigError

TEXT = "task: text\ndata: {data_path: stdlib, sequence_length: 64}\n"


def described(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from described(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description


@pytest.fixture(params=SCHEMAS)
def schema(request: pytest.FixtureRequest) -> type[BaseModel]:
    return SCHEMAS[request.param]


def test_every_setting_has_a_description(schema) -> None:
    assert [path for path, text in described(schema) if not text] == []


def test_canonical_paths_are_those_of_the_schema(schema) -> None:
    assert spellings_of(schema).canonical_paths == {path for path, _ in described(schema)}


def test_spellings_lead_to_settings(schema) -> None:
    names = spellings_of(schema)
    assert set(names.renames.values()) <= names.canonical_paths
    for table in names.translations.values():
        for translated in table.values():
            assert translated.keys() <= names.canonical_paths


def test_every_spelling_leads_somewhere() -> None:
    known = frozenset().union(*(spellings_of(schema).canonical_paths for schema in SCHEMAS.values()))
    assert {*spellings.RENAMED.values(), *mvp_engine.RENAMED.values()} <= known
    for table in (*spellings.TRANSLATED.values(), *mvp_engine.TRANSLATED.values()):
        for translated in table.values():
            assert translated.keys() <= known


def test_no_spelling_hides_a_setting(schema) -> None:
    names = spellings_of(schema)
    hidden = (names.renames.keys() | names.translations.keys()) & names.canonical_paths
    assert hidden == {"parallel.mesh.context"}


def test_no_setting_is_refused(schema) -> None:
    names = spellings_of(schema)
    assert not [path for path in names.canonical_paths if names.refusal(path) is not None]


@pytest.fixture
def read(tmp_path):
    def read_text(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return read_config(path, overrides=overrides)

    return read_text


def test_a_text_run(read, tmp_path) -> None:
    config = read(TEXT, "training.batch_size=4", "lr=0.5").config
    assert isinstance(config, TextRunConfig)
    assert (config.data.sequence_length, config.training.batch_size, config.training.lr) == (64, 4, 0.5)
    (tmp_path / "again.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_the_task_may_come_from_the_command_line(read) -> None:
    assert isinstance(
        read("data: {data_path: stdlib, sequence_length: 8}", "task=text").config, TextRunConfig
    )


@pytest.mark.parametrize("task", ["txt", 3, "null", "[text]"])
def test_other_tasks_are_named(read, task) -> None:
    found = {finding.code: finding for finding in read(f"task: {task}\ndata: {{data_path: x}}").findings}
    assert "text" in found["C003"].hint


def test_a_text_run_has_no_video_settings(read) -> None:
    found = read(TEXT + "num_frame_per_block: 2\nalgorithm: {i2v: true}\n").findings
    assert {(finding.code, finding.at) for finding in found} == {
        ("C001", "num_frame_per_block"),
        ("C001", "algorithm.i2v"),
    }
    assert all("task: video" in finding.hint for finding in found)


def test_a_video_run_has_no_text_settings(read) -> None:
    found = read("image_or_video_shape: [1, 8, 48, 16, 16]\ndata: {data_path: x, tokenizer: byte}\n").findings
    assert [(finding.code, finding.at) for finding in found] == [("C001", "data.tokenizer")]
    assert "task: text" in found[0].hint


def test_a_required_setting_of_text_is_named(read) -> None:
    found = read("task: text\ndata: {data_path: stdlib}").findings
    assert [(finding.code, finding.at) for finding in found] == [("C009", "data.sequence_length")]


MVP = (
    TEXT
    + """
seed: 7
optim: {lr: 0.25, gradient_accumulation_steps: 2, clip_grad_norm: 5.0, mixed_precision: fp32}
loop: {policy: iter, total_steps: 30}
log: {interval: 5}
checkpoint: {interval: 10, keep_n: 2}
parallel:
  mesh: {replicate: 1, shard: 2, tensor: 2}
  backend_kwargs:
    sequence_parallel: true
    fsdp2:
      offload_policy: false
      reshard_after_forward: true
      mp_policy: {param_dtype: float32, reduce_dtype: float32}
"""
)


def test_mvp_engine_spellings(read) -> None:
    reading = read(MVP)
    assert not reading.findings
    config = reading.config
    assert config.training.lr == 0.25
    assert config.training.max_iters == 30
    assert config.training.max_grad_norm == 5.0
    assert config.checkpoints.max_checkpoints == 2
    assert config.logging.seed == 7
    assert config.parallel.mixed_precision == "fp32"
    assert not config.parallel.backend_kwargs.fsdp2.cpu_offload


@pytest.mark.parametrize(
    ("setting", "code", "hint"),
    [
        ("optim: {mixed_precision: fp32}\nparallel: {mixed_precision: bf16}", "C004", "keep one"),
        ("optim: {mixed_precision: fp16}", "C008", "supported: bf16 or fp32"),
        ("loop: {policy: epoch}", "C008", "supported: iter"),
        ("optim: {warmup_ratio: 0.1}", "C008", "training.warmup_steps"),
        ("optim: {global_batch_size: 8}", "C008", "training.batch_size"),
        ("parallel: {backend_kwargs: {ddp: {static_graph: true}}}", "C008", "replicate"),
        (
            "parallel: {backend_kwargs: {fsdp2: {mp_policy: {output_dtype: bfloat16}}}}",
            "C008",
            "mixed_precision",
        ),
        ("parallel: {backend_kwargs: {fsdp2: {target_classes: [Block]}}}", "C008", "block is one FSDP unit"),
        ("parallel: {backend_kwargs: {sequence_paralel: true}}", "C001", "sequence_parallel"),
        ("parallel: {mesh: {sequence: 2}}", "T104", "parallel.mesh.tensor: 2"),
        ("resume: runs/a", "C008", "--logdir"),
        ("checkpoint: {hf_enable: true}", "C008", "exported"),
        ("project: {name: x}", "C008", "--logdir"),
        ("optim: {lrr: 1}", "C001", "optim.lr"),
    ],
)
def test_mvp_engine_settings_without_a_counterpart(read, setting, code, hint) -> None:
    found = read(f"{TEXT}{setting}\n").findings
    assert [finding.code for finding in found] == [code], found
    assert hint in found[0].hint


def test_commands_about_video_refuse_text(read) -> None:
    with pytest.raises(ConfigError, match="C034 task: 'text', and sample is about video"):
        video_config(read(TEXT).config, command="sample")
    written = {"image_or_video_shape": [1, 8, 48, 4, 4], "data": {"data_path": "x"}}
    video = RunConfig.model_validate(written)
    assert video_config(video, command="sample") is video
