"""The decoder on packed documents computes what Hugging Face's own attention computes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from evenspan.errors import ModelError
from evenspan.model.decoder import (
    build_decoder,
    decoder_class,
    hugging_face_config,
    load_decoder,
    packed_table,
    use_cores,
    widen_norms,
)
from evenspan.model.decoder_config import DECODER_PRESETS, DecoderConfig, decoder_config, read_decoder_folder

LENGTHS = ((5, 3, 4), (12,))


def positions_of(lengths):
    return torch.stack([torch.cat([torch.arange(n) for n in sample]) for sample in lengths])


def mask_of(lengths):
    """[B, 1, T, T] additive: 0 where a token of the same document, not later, stands."""
    total = sum(lengths[0])
    document = torch.stack([torch.repeat_interleave(torch.tensor(sample)) for sample in lengths])
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(total, total).tril().bool()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e30)[:, None]


def tokens_of(lengths):
    return torch.randint(0, 258, (len(lengths), sum(lengths[0])), generator=torch.Generator().manual_seed(1))


def logits_of(model, tokens):
    return model(
        input_ids=tokens, position_ids=positions_of(LENGTHS), span_table=packed_table(LENGTHS)
    ).logits


def compared(overrides, reference, *, wide):
    """(our logits, theirs, our gradients, theirs), theirs with Hugging Face's own attention."""
    sizes = decoder_config("Qwen3-nano", overrides=overrides)
    model = build_decoder(sizes, seed=3).double()
    config = hugging_face_config(sizes)
    config._attn_implementation = reference
    theirs = Qwen3ForCausalLM(config).double()
    theirs.load_state_dict(model.state_dict(), strict=True)
    if wide:
        widen_norms(theirs)
    tokens = tokens_of(LENGTHS)
    ours = logits_of(model, tokens)
    want = theirs(
        input_ids=tokens, position_ids=positions_of(LENGTHS), attention_mask=mask_of(LENGTHS)
    ).logits
    ours.square().sum().backward()
    want.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    return ours, want, {name: parameter.grad for name, parameter in model.named_parameters()}, expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reference", ["eager", "sdpa"])
def test_packed_documents_equal_hugging_face_with_a_mask(tied, bias, reference):
    overrides = {"tie_word_embeddings": tied, "attention_bias": bias}
    ours, want, grads, expected = compared(overrides, reference, wide=True)
    # Eager attention computes its softmax in fp32 whatever the model's dtype is.
    bar = 1e-11 if reference == "sdpa" else 1e-6
    torch.testing.assert_close(ours, want, rtol=bar, atol=bar)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= bar * expected[name].norm(), name


def test_the_unchanged_hugging_face_model_differs_by_its_fp32_norms_only():
    ours, want, *_ = compared({}, "sdpa", wide=False)
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_norms_are_hugging_faces_in_fp32_and_bf16(dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    theirs = torch.nn.Sequential(Qwen3RMSNorm(8, eps=1e-3).to(dtype))
    with torch.no_grad():
        theirs[0].weight.copy_(torch.rand(8))
    x = torch.randn(3, 8, dtype=dtype)
    want = theirs(x)
    widen_norms(theirs)
    assert type(theirs[0]).__name__ == "WideRMSNorm"
    assert torch.equal(theirs(x), want)


def test_a_document_does_not_see_the_one_before():
    model = build_decoder(decoder_config("Qwen3-nano"), seed=3).double()
    tokens = tokens_of(LENGTHS)
    other = tokens.clone()
    other[0, :5] = 7
    before, after = logits_of(model, tokens), logits_of(model, other)
    torch.testing.assert_close(before[0, 5:], after[0, 5:], rtol=0, atol=1e-12)
    assert not torch.equal(before[0, :5], after[0, :5])


def test_every_kind_of_core_computes_the_same():
    model = build_decoder(decoder_config("Qwen3-nano"), seed=3).double()
    want = logits_of(model, tokens_of(LENGTHS))
    use_cores(model, "dense")
    torch.testing.assert_close(logits_of(model, tokens_of(LENGTHS)), want, rtol=0, atol=1e-12)


def test_weights_depend_on_the_seed_and_survive_a_folder(tmp_path):
    config = decoder_config("Qwen3-nano")
    first, again, third = (build_decoder(config, seed=seed) for seed in (3, 3, 4))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], third.state_dict()[key])
    first.save_pretrained(tmp_path)
    assert read_decoder_folder(tmp_path) == config
    loaded = load_decoder(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits_of(loaded, tokens_of(LENGTHS)), logits_of(first, tokens_of(LENGTHS)))


def test_state_dict_keys_are_hugging_faces():
    config = decoder_config("Qwen3-nano")
    with torch.device("meta"):
        ours, theirs = (
            decoder_class()(hugging_face_config(config)),
            Qwen3ForCausalLM(hugging_face_config(config)),
        )
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_a_mask_beside_the_table_is_refused():
    model = build_decoder(decoder_config("Qwen3-nano"), seed=3)
    with pytest.raises(TypeError, match="span_table"):
        model(input_ids=tokens_of(LENGTHS))


@pytest.mark.parametrize("name", DECODER_PRESETS)
def test_presets_are_what_hugging_face_makes_of_them(name):
    written = hugging_face_config(DECODER_PRESETS[name])
    assert set(written.layer_types) == {"full_attention"}
    for field, value in dataclasses.asdict(DECODER_PRESETS[name]).items():
        found = written.rope_parameters["rope_theta"] if field == "rope_theta" else getattr(written, field)
        assert found == value, field


def test_unknown_names_and_values_are_named():
    with pytest.raises(ModelError, match="M101") as error:
        decoder_config("Qwen3-tinny")
    assert "Qwen3-tiny" in str(error.value)
    with pytest.raises(ModelError, match="M103") as error:
        decoder_config("Qwen3-nano", overrides={"hiden_size": 8})
    assert "hidden_size" in str(error.value)
    with pytest.raises(ModelError, match="M109"):
        decoder_config("Qwen3-nano", model_path="somewhere", overrides={"hidden_size": 8})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("hidden_size", 3.5),
        ("vocab_size", True),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("rope_theta", 0.0),
        ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", 1),
    ],
)
def test_values_that_cannot_be_are_named(field, value):
    with pytest.raises(ModelError, match="M102") as error:
        decoder_config("Qwen3-nano", overrides={field: value})
    assert field in str(error.value)


def folder_with(tmp_path, **changes):
    content = {**Qwen3Config().to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_a_folder_of_transformers_4_is_read(tmp_path):
    written = folder_with(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=None)
    sizes = read_decoder_folder(written)
    assert (sizes.rope_theta, sizes.hidden_size) == (5e5, 4096)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_dropout": 0.1},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
    ],
)
def test_other_arithmetic_is_refused(tmp_path, changes):
    with pytest.raises(ModelError, match="M108"):
        read_decoder_folder(folder_with(tmp_path, **changes))


def test_folders_that_hold_no_decoder_are_refused(tmp_path):
    with pytest.raises(ModelError, match="M107"):
        load_decoder(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"M107.*'llama'"):
        load_decoder(folder_with(tmp_path, model_type="llama"))
    with pytest.raises(ModelError, match="M107"):
        load_decoder(folder_with(tmp_path))  # no weights
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="M107"):
        read_decoder_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8}')
    with pytest.raises(ModelError, match=r"M107.*vocab_size"):
        read_decoder_folder(tmp_path)


def test_weights_of_another_size_are_refused(tmp_path):
    build_decoder(decoder_config("Qwen3-nano"), seed=3).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    more = {**content, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(more))
    with pytest.raises(ModelError, match=r"M202.*layers\.2"):
        load_decoder(tmp_path)


def test_sizes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DECODER_PRESETS["Qwen3-nano"].vocab_size = 1
    assert isinstance(DECODER_PRESETS["Qwen3-nano"], DecoderConfig)
