"""Every mistake in a plan, or at a planned module, is named; torch's fake backend sends nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenspan.errors import PlanError
from evenspan.parallel.plan import Mode, parse_plan
from evenspan.parallel.resolve import resolve_plan
from evenspan.parallel.tensor import apply_tensor_plan, complete_gradients, complete_gradients_by_hook
from tests.distributed.toy_decoder import WIDTH, RMSNorm, ToyDecoder

TOKENS = torch.arange(16).reshape(2, 8)


@pytest.fixture
def mesh():
    """A tensor mesh of two ranks of which this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def decoder(base=ToyDecoder, **attributes):
    """A toy decoder of a class with other plan attributes; only the head and the embedding by default."""
    plan = {"TP_MODULE_CONFIG": {"Changed": {"lm_head": "col_gather"}}, "SEQUENCE_PARALLEL_MODULE_CONFIG": {}}
    return type("Changed", (base,), {**plan, **attributes})(layers=1, tied=False)


def planned(owner, child, value):
    """A decoder with one entry in its plan, whose embedding cuts the sequence."""
    return decoder(
        TP_MODULE_CONFIG={owner: {child: value}},
        SEQUENCE_PARALLEL_MODULE_CONFIG={"Changed": {"embed_tokens": "split"}},
    )


def resolve(model, *, ranks=2, sequence_parallel=True):
    return resolve_plan(parse_plan(type(model), sequence_parallel=sequence_parallel), model, ranks=ranks)


def error_of(code, call, *args, **options):
    with pytest.raises(PlanError) as raised:
        call(*args, **options)
    assert raised.value.code == code, str(raised.value)
    assert raised.value.hint
    return f"{raised.value}".replace("\n     -> ", " ")


@pytest.mark.parametrize(
    ("attributes", "fact"),
    [
        ({"TP_MODULE_CONFIG": None}, "TP_MODULE_CONFIG is missing"),
        ({"TP_MODULE_CONFIG": {}}, "is {}"),
        ({"TP_MODULE_CONFIG": ["lm_head"]}, r"is ['lm_head']"),
        ({"TP_MODULE_CONFIG": {"Changed": "col"}}, "TP_MODULE_CONFIG['Changed'] is 'col'"),
        ({"SEQUENCE_PARALLEL_MODULE_CONFIG": 1}, "SEQUENCE_PARALLEL_MODULE_CONFIG is 1"),
        ({"TP_MODULE_CONFIG": {"Changed": {"norm": {"mode": "col", "arguments": "x"}}}}, "arguments are 'x'"),
    ],
)
def test_p101_attributes(attributes, fact):
    assert fact in error_of("P101", parse_plan, type(decoder(**attributes)), sequence_parallel=True)


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("column", "= 'column', which is unknown"),
        ("colum", "use one of col"),
        (None, "= None"),
        (
            {"mode": "col", "sequence_dims": 0},
            "key 'sequence_dims', which is unknown use one of sequence_dim",
        ),
        ({"mode": "col", "save": "shards"}, "save 'shards', which is unknown use one of shard"),
        (
            {"mode": "sequence", "arguments": {"m": "splitt"}},
            ".m = 'splitt', which is unknown use one of split",
        ),
        ({"mode": "sequence", "arguments": {"m": {"layout": "split", "dims": 1}}}, "key 'dims'"),
    ],
)
def test_p102_words(value, fact):
    model = planned("Changed", "lm_head", value)
    assert fact in error_of("P102", parse_plan, type(model), sequence_parallel=True)


def test_modes_are_read_in_any_case():
    plan = parse_plan(type(planned("Changed", "lm_head", "COL_Gather")), sequence_parallel=False)
    assert plan.rules[0].mode is Mode.COL_GATHER


def test_p103_classes():
    assert "did you mean Attention" in error_of("P103", resolve, planned("Atention", "q_proj", "col"))


@pytest.mark.parametrize(
    ("owner", "child", "fact"),
    [
        ("Attention", "q_prj", "Attention has no child 'q_prj' did you mean q_proj"),
        ("Block", "self_attn.q_prj", "Block.self_attn has no child 'q_prj'"),
        ("RMSNorm", "weight", "RMSNorm has no children at all"),
    ],
)
def test_p104_children(owner, child, fact):
    assert fact in error_of("P104", resolve, planned(owner, child, "col"))


@pytest.mark.parametrize(
    ("child", "value", "fact"),
    [
        ("norm", "col", "norm is a RMSNorm col needs a Linear"),
        ("embed_tokens", "row", "row needs a Linear"),
        ("norm", "vocab", "needs an Embedding"),
        ("lm_head", "width_norm", "needs an RMS norm"),
        ("norm", {"mode": "sequence", "save": "shard"}, "gathers nothing"),
    ],
)
def test_p105_modes_fit(child, value, fact):
    sequence_parallel = isinstance(value, dict)
    model = planned("Changed", child, value)
    assert fact in error_of("P105", resolve, model, sequence_parallel=sequence_parallel)


def test_p105_head_norms_have_parameters():
    assert "a module with parameters" in error_of("P105", resolve, planned("Block", "dropout", "head_norm"))


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_p105_embeddings_whose_gradients_are_not_sums(option):
    model = planned("Changed", "embed_tokens", "vocab")
    setattr(model.embed_tokens, option, 1.0 if option == "max_norm" else True)
    assert "an Embedding without max_norm" in error_of("P105", resolve, model, sequence_parallel=False)


def test_p106_widths():
    text = error_of("P106", resolve, planned("Changed", "lm_head", "col_gather"), ranks=5)
    assert "lm_head.weight of shape [24, 16] is split col_gather over 5 tensor ranks" in text
    assert "divides 24" in text


@pytest.mark.parametrize("dim", ["1", True, 1.0])
def test_p107_sequence_dims_are_integers(dim):
    model = decoder(SEQUENCE_PARALLEL_SEQUENCE_DIM=dim)
    assert repr(dim) in error_of("P107", parse_plan, type(model), sequence_parallel=True)
    model = planned("Changed", "lm_head", {"mode": "col", "sequence_dim": dim})
    assert repr(dim) in error_of("P107", parse_plan, type(model), sequence_parallel=True)
    model = planned(
        "Changed", "norm", {"mode": "replicated", "arguments": {"m": {"layout": "copy", "dim": dim}}}
    )
    assert repr(dim) in error_of("P107", parse_plan, type(model), sequence_parallel=True)


@pytest.mark.parametrize("dim", [2, -1, 7])
def test_p107_the_features_are_no_sequence(mesh, dim):
    model = decoder(
        SEQUENCE_PARALLEL_SEQUENCE_DIM=dim,
        SEQUENCE_PARALLEL_MODULE_CONFIG={"Changed": {"embed_tokens": "split"}},
    )
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert f"sequence dim {dim} of a tensor of shape [2, 8, 16]" in error_of("P107", model, TOKENS)


def test_p108_postprocessors():
    model = decoder(TP_MODULE_POSTPROCESSORS={"Atention": print})
    assert "did you mean Attention" in error_of("P108", resolve, model)
    model = decoder(TP_MODULE_POSTPROCESSORS={"Attention": "halve"})
    assert "'halve' cannot be called" in error_of("P108", resolve, model)


def test_p109_ties():
    model = planned("Changed", "lm_head", "loss_parallel")
    model.lm_head.weight = model.embed_tokens.weight
    text = error_of("P109", resolve, model)
    assert "embed_tokens.weight whole, lm_head.weight split by dim 0" in text


def test_p110_once(mesh):
    model = decoder(
        TP_MODULE_CONFIG={"Attention": {"q_proj": "col"}, "Block": {"self_attn.q_proj": "row"}},
    )
    assert "layers.0.self_attn.q_proj is planned twice" in error_of("P110", resolve, model)
    model = decoder()
    apply_tensor_plan(model, mesh, sequence_parallel=False)
    assert "applied already" in error_of("P110", apply_tensor_plan, model, mesh, sequence_parallel=False)


SEQUENCE_NORM = {
    "Changed": {"embed_tokens": "split", "norm": "sequence"},
    "Block": {"input_layernorm": "sequence", "post_attention_layernorm": "sequence", "dropout": "sequence"},
}
WHOLE_PLAN = {name: entries for name, entries in ToyDecoder.TP_MODULE_CONFIG.items() if name != "ToyDecoder"}


class Bypassed(ToyDecoder):
    """Feeds its last norm the whole sequence again."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        whole = self.embed_tokens.weight[tokens_BT]
        self.embed_tokens(tokens_BT)
        return self.lm_head(self.norm(whole))


def test_p111_a_whole_tensor_is_never_tiled(mesh):
    model = decoder(Bypassed, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    text = error_of("P111", model, TOKENS)
    assert "norm expects a shard of shape [2, 4, 16] and got the whole sequence: [2, 8, 16]" in text


class Late(ToyDecoder):
    """Cuts the sequence after the module that expects shards."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        whole = self.norm(torch.zeros(2, 8, WIDTH))
        return self.lm_head(whole + self.embed_tokens(tokens_BT))


def test_p111_before_the_entry(mesh):
    model = decoder(Late, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert "nothing cut the sequence yet" in error_of("P111", model, TOKENS)


def test_p111_all_features_reach_a_row_linear(mesh):
    model = decoder(TP_MODULE_CONFIG={"MLP": {"down_proj": "row"}})
    apply_tensor_plan(model, mesh, sequence_parallel=False)
    text = error_of("P111", model, TOKENS)
    assert "layers.0.mlp.down_proj expects this rank's 16 features and got all features: [2, 8, 32]" in text


def test_p112_lengths(mesh):
    model = decoder(SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    text = error_of("P112", model, TOKENS[:, :7])
    assert "embed_tokens: 7 tokens cannot be shared by 2 tensor ranks use 6 or 8 tokens" in text
    assert "use 2 tokens, or parallel.padding" in error_of("P112", model, TOKENS[:, :1])


def test_p112_one_shard_length_has_one_meaning(mesh):
    region = apply_tensor_plan(decoder(), mesh, sequence_parallel=False, padding=True).region
    region.note_length(7, "top_k")
    text = error_of("P112", region.note_length, 8, "layers.1.top_k")
    assert "shards of 4 tokens stand for 7 tokens already and now for 8" in text


def test_p113_unplanned_parameters_between_split_linears(mesh):
    model = decoder(TP_MODULE_CONFIG={"Attention": {"q_proj": "col", "k_proj": "col", "v_proj": "col"}})
    text = error_of("P113", apply_tensor_plan, model, mesh, sequence_parallel=False)
    assert "layers.0.self_attn.o_proj (Linear) holds weight, bias below layers.0.self_attn" in text
    assert "head_norm" in text


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x * self.weight if gate is None else x * self.weight * gate


class GatedDecoder(ToyDecoder):
    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.norm = Gated()
        self.width = 8

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.embed_tokens(tokens_BT), gate=torch.ones(2, self.width, 1)))


def gated(value):
    plan = {"Changed": {"embed_tokens": "split", "norm": value}}
    return decoder(GatedDecoder, SEQUENCE_PARALLEL_MODULE_CONFIG=plan)


def test_p114_tensor_arguments(mesh):
    model = gated("sequence")
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    text = error_of("P114", model, TOKENS)
    assert "norm: tensor argument gate of shape [2, 8, 1] has all 8 tokens" in text
    assert '"arguments": {"gate"' in text
    model = gated({"mode": "sequence", "arguments": {"gates": "split"}})
    text = error_of("P114", apply_tensor_plan, model, mesh, sequence_parallel=True)
    assert "Gated.forward has no argument 'gates' did you mean gate" in text
    model = gated({"mode": "sequence", "arguments": {"gate": {"layout": "split", "dim": 2}}})
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert "norm.gate of shape [2, 8, 1] cannot be cut along dim 2" in error_of("P114", model, TOKENS)


@pytest.mark.parametrize("value", ["split", {"layout": "split", "dim": 1}])
def test_declared_tensor_arguments_pass(mesh, value):
    model = gated({"mode": "sequence", "arguments": {"gate": value}})
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert model(TOKENS).shape == (2, 8, 24)


def test_p115_gradients_are_completed_once(mesh):
    model = decoder(TP_MODULE_CONFIG=WHOLE_PLAN, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    model(TOKENS).sum().backward()
    assert complete_gradients(model) > 0
    text = error_of("P115", complete_gradients, model)
    assert "was summed over the 2 tensor ranks already" in text
    model.zero_grad()
    model(TOKENS).sum().backward()
    complete_gradients(model)


def test_p115_hooks_and_calls_exclude_each_other(mesh):
    model = decoder(TP_MODULE_CONFIG=WHOLE_PLAN, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    complete_gradients_by_hook(model)
    assert "installed already" in error_of("P115", complete_gradients_by_hook, model)
    model(TOKENS).sum().backward()
    assert "leave complete_gradients out" in error_of("P115", complete_gradients, model)


class Odd(ToyDecoder):
    """Runs an unplanned module between shards on something that is no shard."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.side = RMSNorm(WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        return self.lm_head(self.norm(x + self.side(x[:, :3]).mean(1, keepdim=True)))


def test_p116_unplanned_modules_between_shards(mesh):
    model = decoder(Odd, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    text = error_of("P116", model, TOKENS)
    assert "side (RMSNorm) holds parameters, stands between shards, and got [2, 3, 16]" in text


class Twice(ToyDecoder):
    """Runs one unplanned norm before the sequence is cut and after."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.side = RMSNorm(WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.side(torch.zeros(2, 8, WIDTH))
        return self.lm_head(self.norm(self.side(self.embed_tokens(tokens_BT))))


def test_p116_one_parameter_has_one_layout(mesh):
    model = decoder(Twice, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert "side.weight worked on shards in one call and on whole" in error_of("P116", model, TOKENS)


def test_p116_replicated_work_needs_whole_input(mesh):
    plan = {"Changed": {"embed_tokens": "split", "norm": "replicated"}}
    model = decoder(SEQUENCE_PARALLEL_MODULE_CONFIG=plan)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    assert "norm is planned as replicated, but got a shard: [2, 4, 16]" in error_of("P116", model, TOKENS)


def test_p117_entries():
    model = decoder(SEQUENCE_PARALLEL_MODULE_CONFIG={"Changed": {"norm": "sequence"}})
    assert "nothing cuts the sequence" in error_of("P117", resolve, model)


class Named(ToyDecoder):
    """Hands its norm two keyword tensors of no usual name."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.norm = NamedNorm()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        return self.lm_head(self.norm(left=x, right=x))


class NamedNorm(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def test_p118_hidden_states(mesh):
    model = decoder(Named, SEQUENCE_PARALLEL_MODULE_CONFIG=SEQUENCE_NORM)
    apply_tensor_plan(model, mesh, sequence_parallel=True)
    text = error_of("P118", model, TOKENS)
    assert "norm was called without a hidden state (0 positional arguments, keywords left, right)" in text
