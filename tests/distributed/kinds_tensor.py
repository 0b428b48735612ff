"""Small models, each with something that people's models do and a tensor plan must get right.

Every kind maps [B, T, WIDTH] to hidden states that all ranks hold whole, or to something that contains them.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.distributed.toy_decoder import MLP, WIDTH, Attention, RMSNorm

PROJECTIONS: dict[str, Any] = {
    "q_proj": "col", "k_proj": "col", "v_proj": "col", "o_proj": "row",
    "q_norm": "head_norm", "k_norm": "head_norm",
}  # fmt: skip
FEED_FORWARD: dict[str, Any] = {"gate_proj": "col", "up_proj": "col", "down_proj": "row"}
ENDS: dict[str, Any] = {"entry": "split", "exit": "gather_output"}

KINDS: dict[str, type[Kind]] = {}
WRONG: dict[str, type[Kind]] = {}
"""Models whose plan is a mistake that only a run can show."""


class Kind(nn.Module):
    """Blocks between an entry and an exit; a subclass changes what it is about."""

    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {"Attention": PROJECTIONS, "MLP": FEED_FORWARD}
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {}
    lengths: ClassVar[tuple[int, ...]] = (8,)

    def __init_subclass__(cls, *, tp: dict[str, Any] | None = None, sp: dict[str, Any] | None = None,
                          wrong: bool = False) -> None:  # fmt: skip
        (WRONG if wrong else KINDS)[cls.__name__] = cls
        cls.TP_MODULE_CONFIG = {**Kind.TP_MODULE_CONFIG, **(tp or {})}
        cls.SEQUENCE_PARALLEL_MODULE_CONFIG = {cls.__name__: ENDS, **(sp or {})}

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Identity(), nn.Identity()
        self.make()

    def make(self) -> None:
        self.attention = Attention(bias=True, sequence_first=False)
        self.mlp = MLP(bias=True)

    def forward(self, x: Tensor) -> Any:
        return self.exit(self.inner(self.entry(x)))

    def inner(self, x: Tensor) -> Any:
        x = x + self.attention(hidden_states=x)
        return x + self.mlp(x)


class Plain(Kind, tp={"Attention": PROJECTIONS, "MLP": FEED_FORWARD}):
    """Only the sublayers."""


class ScaledNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(
        self, x: Tensor, scale: Tensor, offset: float = 0.0, *, shift: Tensor | None = None
    ) -> Tensor:
        x = functional.rms_norm(x, (WIDTH,)) * self.weight * scale + offset
        return x if shift is None else x + shift


class FurtherInputs(Kind, sp={"ScaledNorm": {"self": {"mode": "sequence", "arguments": {
    "scale": "split", "shift": {"layout": "split", "dim": 0}}}}}):  # fmt: skip
    """A norm with a further positional tensor, a number and a keyword tensor along another dim."""

    def make(self) -> None:
        super().make()
        self.norm = ScaledNorm()
        self.per_token = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.per_token(x), self.per_token(x)[0]
        h = self.entry(x)
        h = h + self.mlp(self.norm(h, scale, 0.25, shift=shift))
        return self.exit(h)


class FrozenParts(Kind, sp={"FrozenParts": {**ENDS, "norm": "sequence"}}):
    """Frozen norms, weights and biases beside trained ones."""

    def make(self) -> None:
        super().make()
        self.norm = RMSNorm(WIDTH)
        for frozen in (self.norm.weight, self.attention.q_proj.weight, self.attention.o_proj.bias,
                       self.attention.k_norm.weight, self.mlp.down_proj.weight):  # fmt: skip
            frozen.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        return x + super().inner(self.norm(x))


class CompoundNorm(Kind, sp={"CompoundNorm": {**ENDS, "norm": "sequence"}}):
    """A sequence-planned Sequential."""

    def make(self) -> None:
        super().make()
        self.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.0), nn.Sequential(RMSNorm(WIDTH)))

    def inner(self, x: Tensor) -> Tensor:
        return x + super().inner(self.norm(x))


class HeadNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = RMSNorm(4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.gain


class Routed(nn.Module):
    """Each rank weighs its features by what the gate says; the router only makes a number for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
        self.router = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down_proj(functional.silu(self.up_proj(x)) * self.gate(x))
        return out, self.router(x).square().mean()


class CompoundBelowGather(Kind, tp={
    "Attention": {**PROJECTIONS, "q_norm": "head_norm"},
    "Routed": {"up_proj": "col", "down_proj": "row", "gate": "head_norm", "router": "replicated"},
}):  # fmt: skip
    """Modules of several modules as head_norm and as replicated; an auxiliary loss of the latter."""

    def make(self) -> None:
        super().make()
        self.attention.q_norm = HeadNorms()
        self.routed = Routed()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.entry(x))
        out, auxiliary = self.routed(h)
        return self.exit(h + out) * (1 + auxiliary)


class Nested(Kind, tp={"Nested": {
    **{f"deep.0.{name}": mode for name, mode in PROJECTIONS.items()}, "deep.0": "gather",
}}):  # fmt: skip
    """Planned by dotted paths from the root."""

    def make(self) -> None:
        self.deep = nn.ModuleList([Attention(bias=False, sequence_first=False)])
        self.mlp = MLP(bias=True)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.deep[0](x))


class Reused(Kind, sp={"Reused": {**ENDS, "norm": "sequence"}}):
    """One block in a list three times, one norm called before each, sublayers called twice."""

    def make(self) -> None:
        super().make()
        self.norm = RMSNorm(WIDTH)
        self.layers = nn.ModuleList([self.mlp, self.mlp, self.mlp])

    def inner(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.attention(x + self.attention(x))


Pair = namedtuple("Pair", ("count", "hidden", "note"))


@dataclass
class Output:
    """What some models return."""

    loss: Tensor | None
    last_hidden_state: Tensor
    note: str = ""


class Wrapped(nn.Module):
    """Returns its input in one of the containers that models use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        return {
            "tuple": (x, "cache"),
            "list": [None, x],
            "namedtuple": Pair(3, x, "n"),
            "dataclass": Output(loss=None, last_hidden_state=x, note="n"),
            "dict": OrderedDict(mask=None, hidden=x),
        }[self.kind]


def unwrap(output: Any) -> Tensor:
    values = output.values() if isinstance(output, dict) else (
        vars(output).values() if isinstance(output, Output) else output)  # fmt: skip
    return next(value for value in values if isinstance(value, torch.Tensor))


class Containers(Kind, sp={"Containers": {
    **{f"cuts.{number}": "split" for number in range(5)},
    **{f"joins.{number}": "gather_output" for number in range(5)},
}}):  # fmt: skip
    """Entries and exits that return tuples, lists, named tuples, dataclasses and dicts."""

    def make(self) -> None:
        super().make()
        kinds = ("tuple", "list", "namedtuple", "dataclass", "dict")
        self.cuts = nn.ModuleList([Wrapped(kind) for kind in kinds])
        self.joins = nn.ModuleList([Wrapped(kind) for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        for cut, join in zip(self.cuts, self.joins, strict=True):
            shard = cut(x)
            whole = join(x[:, : unwrap(shard).shape[1]] * 0 + self.inner(unwrap(shard)))
            assert type(whole) is type(shard)
            x = unwrap(whole)
        return x


class OddStrides(Kind):
    """Permuted inputs, outputs and gradients at every boundary."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.transpose(1, 2).contiguous().transpose(1, 2))
        x = self.inner(x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
        x = self.mlp(x.expand(3, *x.shape)[1]).view(x.shape)
        return self.exit(x.flip(-1)).transpose(1, 2)[..., ::2]


class GroupedQuery(Kind):
    """Two key and value heads for four query heads."""

    def make(self) -> None:
        super().make()
        self.attention = Grouped()


class Grouped(Attention):
    def __init__(self) -> None:
        super().__init__(bias=True, sequence_first=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))


GroupedQuery.TP_MODULE_CONFIG = {**Kind.TP_MODULE_CONFIG, "Grouped": PROJECTIONS}
del GroupedQuery.TP_MODULE_CONFIG["Attention"]


class PeekWithoutGradient(Kind):
    """The same input is read without gradients, written to, and read again."""

    def inner(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.mlp(x).norm(dim=-1, keepdim=True)
            y = x.clone()
            first = self.mlp(y)
            y += 1
            ratio = torch.sigmoid(self.mlp(y) - first)
        x = self.mlp(x) / before + x * ratio
        return x + self.attention(x) + self.mlp(x)


class ListsOfParameters(Kind):
    """Learned gains in containers that are never called, used between shards."""

    def make(self) -> None:
        super().make()
        self.blocks = nn.ModuleList([Gains(), Gains()])

    def inner(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(super().inner(x))
        return x


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.rand(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gains[0] * self.gains[1] + self.named["bias"]


class OneRankOnly(Kind):
    """A linear that only the first token reaches: the other ranks have no gradient of it at all."""

    def make(self) -> None:
        super().make()
        self.first, self.never = FirstToken(), FirstToken()

    def forward(self, x: Tensor) -> Tensor:
        marks = torch.arange(x.shape[1])[:, None].expand(*x.shape[:2], 1).to(x)
        marked = self.entry(torch.cat((marks, x[..., 1:]), dim=-1))
        return self.exit(marked + self.first(self.inner(marked), marked[..., :1]))


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        here = mark == 0
        return torch.where(here, self.proj(x), x) if bool(here.any()) else x


class Checkpointed(Kind):
    """torch's own checkpointing around sublayers, with its determinism check, both implementations."""

    def inner(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attention, x, use_reentrant=False, determinism_check="default")
        x = x + checkpoint(self.mlp, x, use_reentrant=True)
        return x + checkpoint(super().inner, x, use_reentrant=False)


class CheckpointedShards(Checkpointed, tp={
    "Attention": {"self": {"mode": "gather", "save": "shard"}, **PROJECTIONS},
    "MLP": {"self": {"mode": "gather", "save": "shard"}, **FEED_FORWARD},
}):  # fmt: skip
    """The same, keeping only shards."""


class ColumnsOfShards(Kind, tp={"MLP": {**FEED_FORWARD, "gate_proj": {"mode": "col", "save": "shard"}}},
                      sp={"Mixed": {"norm": "sequence", "up": "col", "down": "row"}}):  # fmt: skip
    """Column linears whose parent also works on shards: they gather themselves, once."""

    def make(self) -> None:
        super().make()
        self.mixed = Mixed()

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(self.mixed(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


ColumnsOfShards.TP_MODULE_CONFIG["Mixed"] = {"up": "col", "down": "row"}


class Conv1D(nn.Module):
    """A linear that stores [in, out], of the name that GPT-2 uses."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 4), nn.Parameter(torch.rand(nf))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], self.nf)


class Transposed(Kind, tp={"Feed": {"c_fc": "col", "c_proj": "row"}}):
    """Linears that store [in, out]."""

    def make(self) -> None:
        super().make()
        self.feed = Feed()

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x + self.feed(x))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(32, WIDTH), Conv1D(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(torch.tanh(self.c_fc(x)))


class TokensFirst(nn.Module):
    """A part of a batch-first model that works on [tokens, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(WIDTH), MLP(bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class OtherDim(Kind, tp={"TokensFirst": {"mlp": {"mode": "gather", "sequence_dim": 0}, **{
    f"mlp.{name}": {"mode": mode, "sequence_dim": 0} for name, mode in FEED_FORWARD.items()}}},
    sp={"TokensFirst": {"self": {"mode": "sequence", "sequence_dim": 0},
                        "norm": {"mode": "sequence", "sequence_dim": 0}}}):  # fmt: skip
    """Two sequence dims in one model."""

    def make(self) -> None:
        self.attention = Attention(bias=True, sequence_first=False)
        self.part = TokensFirst()

    def inner(self, x: Tensor) -> Tensor:
        return self.part((x + self.attention(x)).transpose(0, 1)).transpose(0, 1)


del OtherDim.TP_MODULE_CONFIG["MLP"]


class UnevenForwards(Checkpointed):
    """Several forwards of other lengths before the first backward, recomputed."""

    lengths = (7, 8, 5, 6)


class GateTakenForReplicated(CompoundBelowGather, wrong=True, tp={
    "Routed": {"up_proj": "col", "down_proj": "row", "gate": "replicated", "router": "replicated"},
    "Attention": PROJECTIONS,
}):  # fmt: skip
    """Every rank gates its own features, so the gate's gradient is a part."""


class ReadOnly(Kind, wrong=True):
    """Reads the weight of a linear that it never calls."""

    def make(self) -> None:
        super().make()
        self.aside = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(functional.linear(x, self.aside.weight))


class TiedAcross(Kind, wrong=True):
    """One weight on whole tensors and on shards."""

    def make(self) -> None:
        super().make()
        self.outside, self.inside = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.inside.weight = self.outside.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.inner(self.inside(self.entry(self.outside(x)))))
