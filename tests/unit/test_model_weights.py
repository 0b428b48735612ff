"""Weights travel to and from diffusers folders; a folder that does not fit says everything at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from evenspan.attention.patterns import full
from evenspan.errors import ModelError
from evenspan.model.initialize import init_weights
from evenspan.model.presets import model_preset
from evenspan.model.wan import CausalWan
from evenspan.model.weights import (
    INDEX_NAME,
    WEIGHTS_NAME,
    load_diffusers_folder,
    read_config,
    save_diffusers_folder,
)

NANO = model_preset("wan-nano")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = CausalWan(NANO)
    init_weights(model, seed=1, head_std=0.1)
    save_diffusers_folder(tmp_path / "saved", config=NANO, state_dict=model.state_dict())
    return tmp_path / "saved"


def _edit(folder: Path, edit) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS_NAME)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


@pytest.mark.parametrize("shard_size", ["10GB", "100KB"])
def test_a_folder_written_by_diffusers(tmp_path: Path, shard_size: str) -> None:
    from diffusers import WanTransformer3DModel

    reference = WanTransformer3DModel(**dataclasses.asdict(NANO))
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX_NAME).exists() == (shard_size == "100KB")
    model = CausalWan(read_config(tmp_path))
    assert model.config == NANO
    load_diffusers_folder(model, tmp_path)
    noisy, text, times = torch.randn(1, 3, 4, 4, 4), torch.randn(1, 1, 5, 16), torch.full((1, 3), 400.0)
    with torch.no_grad():
        expected = reference(noisy.transpose(1, 2), times[:, 0], text[:, 0]).sample.transpose(1, 2)
        got = model(
            noisy,
            times,
            text,
            positions_BF=torch.arange(3)[None],
            prompt_of_frame_BF=torch.zeros(1, 3, dtype=torch.long),
            table=full(12),
        )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_diffusers_reads_our_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import WanTransformer3DModel

    # Otherwise from_pretrained asks for the package accelerate, which concerns dtypes, not the folder.
    monkeypatch.setattr(WanTransformer3DModel, "_keep_in_fp32_modules", None)

    reference = WanTransformer3DModel.from_pretrained(saved, low_cpu_mem_usage=False)
    model = CausalWan(NANO)
    init_weights(model, seed=1, head_std=0.1)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_round_trip_keeps_the_models_dtype(saved: Path) -> None:
    model = CausalWan(NANO).double()
    load_diffusers_folder(model, saved)
    assert model.proj_out.weight.dtype == torch.float64
    assert float(model.proj_out.weight.detach().std()) == pytest.approx(0.1, rel=0.2)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"], (
        "temporary folders are renamed or removed"
    )


def test_every_difference_in_one_error(saved: Path) -> None:
    def edit(tensors) -> None:
        tensors["blocks.0.attn1.to_qq.weight"] = tensors.pop("blocks.0.attn1.to_q.weight")
        tensors["proj_out.bias"] = torch.zeros(3)
        del tensors["scale_shift_table"]

    _edit(saved, edit)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps({**config, "num_attention_heads": 8, "attention_head_dim": 6})
    )
    model = CausalWan(NANO)
    before = model.proj_out.weight.clone()
    with pytest.raises(ModelError) as caught:
        load_diffusers_folder(model, saved)
    assert caught.value.code == "M202"
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:-1] == [
        "field num_attention_heads: the model has 4, the folder 8",
        "field attention_head_dim: the model has 12, the folder 6",
        "missing: blocks.0.attn1.to_q.weight (nearest: blocks.0.attn1.to_qq.weight)",
        "missing: scale_shift_table",
        "not in the model: blocks.0.attn1.to_qq.weight (nearest: blocks.0.attn1.to_q.weight)",
        "shape of proj_out.bias: the model has [16], the folder [3]",
    ]
    assert torch.equal(model.proj_out.weight, before)


def test_a_truncated_file_is_named(saved: Path) -> None:
    content = (saved / WEIGHTS_NAME).read_bytes()
    (saved / WEIGHTS_NAME).write_bytes(content[:-100])
    with pytest.raises(
        ModelError, match=rf"M203 .*{WEIGHTS_NAME} \({len(content) - 100} bytes\) is truncated"
    ):
        load_diffusers_folder(CausalWan(NANO), saved)


def test_folders_that_are_none(saved: Path, tmp_path: Path) -> None:
    model = CausalWan(NANO)
    with pytest.raises(ModelError, match=r"M201 .*nowhere.config.json does not exist"):
        load_diffusers_folder(model, tmp_path / "nowhere")
    (tmp_path / "pipeline" / "transformer").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"use .*pipeline.transformer"):
        read_config(tmp_path / "pipeline")
    with pytest.raises(ModelError, match=r"M204 .*saved exists"):
        save_diffusers_folder(saved, config=NANO, state_dict=model.state_dict())
    index = {"weight_map": {"proj_out.bias": "b.safetensors", "proj_out.weight": "a.safetensors"}}
    (saved / WEIGHTS_NAME).unlink()
    with pytest.raises(ModelError, match=r"M201 neither"):
        load_diffusers_folder(model, saved)
    (saved / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"M201 .*absent: a.safetensors, b.safetensors"):
        load_diffusers_folder(model, saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"M203 .*config.json is not JSON"):
        read_config(saved)
    (saved / "config.json").write_text('{"_class_name": "UNet"}')
    with pytest.raises(ModelError, match=r"M201 .*describes a UNet"):
        read_config(saved)
