"""Every rule: its page's bad example yields exactly its code, its good example none, and the hints hold."""

import re
from pathlib import Path

import pytest

from evenspan.check.explain import explain, explained_codes
from evenspan.check.registry import Run
from evenspan.check.rules import RULES, check_config, check_file
from evenspan.config.schema import RunConfig
from evenspan.config.text_schema import TextRunConfig
from evenspan.errors import ConfigError

EXAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
HEADINGS = ["## What it does", "## Why it is wrong", "## Example", "## Use instead"]
CODES = explained_codes()
OWN_CODES = """
C001 C002 C003 C004 C005 C006 C007 C008 C009 C010 C012 C013 C014 C015 C016
T102 T103 T104 T106 T110 T111 T112 T113
S201 S203 S204 S205 S206 S207
M101 M102 M103 M107 M109 M301 M302 M303 M304 M305 M306
D401 D402 D901 D902
A304
"""


def yaml_examples(code: str) -> list[str]:
    return EXAMPLE.findall(explain(code))


WITH_YAML = [code for code in CODES if yaml_examples(code)]


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # A304 depends on the machine
    for folder in ("video", "caption"):
        (tmp_path / "data" / "demo" / folder / "walk").mkdir(parents=True)


def codes_of(text: str) -> list[str]:
    Path("run.yaml").write_text(text)
    world = re.search(r"--world-size (\d+)", text)
    result = check_file("run.yaml", world_size=int(world.group(1)) if world else None)
    return [finding.code for finding in result.findings]


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_the_fixed_headings(code: str) -> None:
    lines = explain(code).splitlines()
    assert re.fullmatch(rf"# {code} [a-z0-9-]+", lines[0])
    assert [line for line in lines if line.startswith("## ")] == HEADINGS


@pytest.mark.parametrize("code", WITH_YAML)
def test_the_bad_example_yields_its_code_and_the_good_one_none(code: str) -> None:
    bad, good = yaml_examples(code)
    assert codes_of(bad) == [code]
    assert codes_of(good) == []


def test_the_codes_of_configurations_are_these() -> None:
    assert set(OWN_CODES.split()) <= set(CODES)
    assert {rule.code for rule in RULES} <= set(OWN_CODES.split())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_has_a_page_with_examples_and_its_name(rule) -> None:
    assert rule.code in WITH_YAML
    assert explain(rule.code).startswith(f"# {rule.code} {rule.name}\n")


def test_rule_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


def test_explain_takes_lower_case_and_refuses_unknown_codes() -> None:
    assert explain("s201").startswith("# S201")
    with pytest.raises(ConfigError, match=r"C016.*S2O1"):
        explain("S2O1")


def make(**changes) -> RunConfig:
    base = {
        "model_kwargs": {"model_name": "Wan2.2-TI2V-5B"},
        "image_or_video_shape": [1, 96, 48, 44, 80],
        "num_frame_per_block": 8,
        "sequence_parallel_size": 4,
        "data": {"data_path": "data/demo"},
    }
    return RunConfig.model_validate({**base, **changes})


def findings_of(config: RunConfig, world_size: int | None = 8) -> dict[str, str]:
    return {finding.code: str(finding) for finding in check_config(config, world_size=world_size)}


def test_the_shipped_shape_is_legal() -> None:
    assert findings_of(make()) == {}


def test_the_seeds_shape_names_64_96_and_what_fits_81() -> None:
    found = findings_of(make(image_or_video_shape=[1, 81, 4, 256, 256], data={"data_path": "data/videos"}))
    assert list(found) == ["S201", "M302", "D401"]
    assert "use 64 or 96 frames" in found["S201"]
    assert "sequence_parallel_size 1 with num_frame_per_block 1, 3, 9, 27 or 81" in found["S201"]
    assert "parallel.padding=auto" in found["S201"]
    assert "4 latent channels" in found["M302"]
    assert "use 48 channels: [1, 81, 48, 256, 256]" in found["M302"]


def test_without_a_world_size_frames_may_fit_more_ranks() -> None:
    found = findings_of(make(image_or_video_shape=[1, 81, 48, 44, 80]), world_size=None)
    assert "sequence_parallel_size 3 with num_frame_per_block 1, 3, 9 or 27" in found["S201"]


def test_padding_makes_any_number_of_frames_legal() -> None:
    assert findings_of(make(image_or_video_shape=[1, 81, 48, 44, 80], parallel={"padding": "auto"})) == {}


@pytest.mark.parametrize("context", [5, 16])
def test_ranks_must_divide_the_24_heads(context: int) -> None:
    config = make(sequence_parallel_size=context, image_or_video_shape=[1, 640, 48, 44, 80])
    found = findings_of(config, world_size=None)
    assert list(found) == ["M301"]
    assert "1, 2, 3, 4, 6, 8, 12 or 24" in found["M301"]


def test_the_world_lists_the_legal_context_degrees() -> None:
    found = findings_of(make(), world_size=6)
    assert list(found) == ["T103"]
    assert "start 4 or 8 ranks" in found["T103"]
    assert "with 6 ranks sequence_parallel_size is 1, 2, 3 or 6" in found["T103"]


def test_a_full_mesh_must_match_the_world() -> None:
    config = make(parallel={"mesh": {"replicate": 2, "shard": 1}})
    assert findings_of(config, world_size=8) == {}
    assert "start 8 ranks" in findings_of(config, world_size=4)["T103"]


TENSOR_SP = {"backend_kwargs": {"sequence_parallel": True}}


@pytest.mark.parametrize(
    ("mesh", "legal"),
    [
        ({"tensor": 2, "shard": 1}, False),
        ({"tensor": 1, "shard": 2}, False),
        ({"tensor": 2, "shard": 2}, True),
        ({"tensor": -1, "shard": 4}, False),
        ({"tensor": 2, "shard": -1}, True),
    ],
)
def test_tensor_sequence_parallelism_needs_both_axes(mesh, legal) -> None:
    found = findings_of(make(sequence_parallel_size=1, parallel={"mesh": mesh, **TENSOR_SP}), world_size=4)
    assert ("T106" not in found) == legal


def test_a_context_axis_shards_parameters_too() -> None:
    config = make(
        sequence_parallel_size=2, parallel={"mesh": {"tensor": 2, "shard": 1, "replicate": 1}, **TENSOR_SP}
    )
    assert findings_of(config, world_size=4) == {}


def test_tensor_and_context_share_the_heads() -> None:
    config = make(sequence_parallel_size=4, parallel={"mesh": {"tensor": 4, "shard": 1}})
    found = findings_of(config, world_size=16)
    assert list(found) == ["M303"]
    assert "tensor 4 x context 4 does not divide the 24" in found["M303"]
    assert "parallel.mesh.tensor is 1, 2, 3 or 6" in found["M303"]


def test_tensor_shards_of_a_clip_are_whole_frames() -> None:
    shape = [1, 84, 48, 44, 80]
    mesh = {"tensor": 8, "shard": 2}
    config = make(
        sequence_parallel_size=1,
        num_frame_per_block=2,
        image_or_video_shape=shape,
        parallel={"mesh": mesh, **TENSOR_SP},
    )
    assert list(findings_of(config, world_size=16)) == []
    config = config.model_copy(update={"image_or_video_shape": (1, 82, 48, 44, 80)})
    found = findings_of(config, world_size=16)
    assert list(found) == ["S206"]
    assert "use 80 or 84 latent frames" in found["S206"]


def text_findings(world_size: int | None = None, **settings: object) -> dict[str, str]:
    written = {"task": "text", "model_kwargs": {"model_name": "Qwen3-nano"}}
    written |= {"data": {"data_path": "stdlib", "sequence_length": 64}, **settings}
    found = check_config(TextRunConfig.model_validate(written), world_size=world_size)
    return {finding.code: f"{finding.fact} {finding.hint}" for finding in found}


def test_a_text_run_has_no_findings() -> None:
    mesh = {"tensor": 2, "shard": 2}
    assert text_findings(4, parallel={"mesh": mesh, **TENSOR_SP}) == {}
    assert text_findings(4, sequence_parallel_size=2) == {}


@pytest.mark.parametrize(
    ("settings", "code", "hint"),
    [
        ({"parallel": {"mesh": {"tensor": 4}}}, "M304", "parallel.mesh.tensor is 1 or 2"),
        (
            {"parallel": {"mesh": {"tensor": 2}}, "sequence_parallel_size": 4},
            "M303",
            "parallel.mesh.tensor is 1",
        ),
        ({"model_kwargs": {"model_name": "Qwen3-nono"}}, "M101", "Qwen3-nano"),
        (
            {"model_kwargs": {"model_name": "Qwen3-nano", "overrides": {"layers": 3}}},
            "M103",
            "num_hidden_layers",
        ),
        ({"model_kwargs": {"model_name": "Qwen3-nano", "overrides": {"head_dim": 3}}}, "M102", "even"),
        ({"model_kwargs": {"model_path": "nowhere"}}, "M107", "save_pretrained"),
        ({"data": {"data_path": "nowhere", "sequence_length": 64}}, "D901", "stdlib"),
        (
            {"data": {"data_path": "stdlib", "pattern": "*.q", "sequence_length": 64}},
            "D902",
            "has files with",
        ),
        (
            {"data": {"data_path": "stdlib", "sequence_length": 63}, "sequence_parallel_size": 2},
            "S207",
            "62 or 64",
        ),
        ({"training": {"warmup_steps": 10, "max_iters": 5}}, "C014", "use 0 to 5"),
        ({"parallel": {"mesh": {"tensor": 2, "shard": 1}, **TENSOR_SP}}, "T106", "parallel.mesh.shard: 2"),
    ],
)
def test_mistakes_of_text_runs(settings, code, hint) -> None:
    found = text_findings(**settings)
    assert list(found) == [code]
    assert hint in found[code]


def test_tensor_ranks_cut_the_tokens_of_a_context_rank() -> None:
    data = {"data_path": "stdlib", "sequence_length": 62}
    parallel = {"mesh": {"tensor": 2, "shard": 1}, **TENSOR_SP}
    found = text_findings(4, data=data, parallel=parallel, sequence_parallel_size=2)
    assert list(found) == ["S206"]
    assert "use 60 or 64 tokens" in found["S206"]
    padded = text_findings(4, data=data, parallel={**parallel, "padding": "auto"}, sequence_parallel_size=2)
    assert padded == {}


def test_the_position_table_holds_1024() -> None:
    found = findings_of(make(image_or_video_shape=[1, 1056, 48, 44, 80]))
    assert "1056 positions" in found["S203"]
    assert "at most 1024" in found["S203"]
    assert findings_of(make(image_or_video_shape=[1, 1024, 48, 44, 80])) == {}
    long_evaluation = findings_of(make(evaluation={"num_frames": 2048}))
    assert "evaluation.num_frames" in long_evaluation["S203"]


def test_odd_height_and_width_are_two_findings() -> None:
    found = check_config(make(image_or_video_shape=[1, 96, 48, 45, 81]), world_size=8)
    assert [finding.code for finding in found] == ["S204", "S204"]
    assert "height 44 or 46" in found[0].hint
    assert "width 80 or 82" in found[1].hint


def test_a_codec_that_writes_other_channels_is_named_with_one_that_fits() -> None:
    found = findings_of(make(data={"data_path": "data/demo", "codec": {"spatial": 2}}))
    assert list(found) == ["M302"]
    assert "writes 12 channels" in found["M302"]
    assert "spatial 4 with temporal 1" in found["M302"]
    latents = make(data={"data_path": "data/demo", "codec": {"spatial": 2}, "kind": "latents"})
    assert list(findings_of(latents)) == ["D402"]


def test_channels_overridden_for_a_small_model_count() -> None:
    model = {"model_name": "wan-tiny", "overrides": {"in_channels": 12, "out_channels": 12}}
    data = {"data_path": "data/demo", "codec": {"spatial": 2}}
    assert findings_of(make(model_kwargs=model, image_or_video_shape=[1, 96, 12, 44, 80], data=data)) == {}


def test_a_model_that_writes_other_channels_than_it_reads() -> None:
    model = {"model_name": "wan-tiny", "overrides": {"out_channels": 12}}
    (finding,) = check_config(make(model_kwargs=model), world_size=None)
    assert (finding.code, finding.at) == ("M302", "model_kwargs.overrides")


def test_override_of_another_kind_is_named() -> None:
    model = {"model_name": "wan-tiny", "overrides": {"num_layers": 2.5, "patch_size": [1, 4]}}
    found = check_config(make(model_kwargs=model), world_size=None)
    assert [finding.at for finding in found if finding.code == "M102"] == [
        "model_kwargs.overrides.num_layers",
        "model_kwargs.overrides.patch_size",
    ]


def test_paths_are_not_looked_at_when_asked_not_to() -> None:
    config = make(data={"data_path": "nowhere"})
    assert check_config(config, world_size=8, check_paths=False) == []
    assert list(findings_of(config)) == ["D401"]


def test_a_window_without_causality_and_a_sink_without_window() -> None:
    algorithm = {"causal": False, "teacher_forcing": False}
    model = {"model_name": "Wan2.2-TI2V-5B", "local_attn_size": 8}
    assert list(findings_of(make(model_kwargs=model, algorithm=algorithm))) == ["C012"]
    sink = {"model_name": "Wan2.2-TI2V-5B", "sink_size": 8}
    assert "C012" in findings_of(make(model_kwargs=sink))


def test_a_rule_stays_silent_when_what_it_reads_is_broken() -> None:
    text = "image_or_video_shape: [1, 0, 48, 44, 80]\nsequence_parallel_size: 5\ndata: {data_path: nowhere}\n"
    assert codes_of(text) == ["C003", "M301", "D401"]


def test_findings_stand_at_the_name_the_user_wrote() -> None:
    Path("run.yaml").write_text(
        "infra: {sequence_parallel_size: 5}\n"
        "data: {data_path: data/demo, image_or_video_shape: [1, 81, 48, 44, 80]}\n"
        "model: {num_frame_per_block: 8}\n"
    )
    result = check_file("run.yaml", world_size=8)
    assert [finding.at for finding in result.findings] == [
        "infra.sequence_parallel_size",
        "data.image_or_video_shape",
        "infra.sequence_parallel_size",
    ]


def test_a_run_with_an_unknown_model_has_no_model() -> None:
    assert Run(config=make(model_kwargs={"model_name": "x"}), world_size=None).model is None
