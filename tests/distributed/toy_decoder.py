"""A small decoder that reshapes by the length of its input, as Hugging Face attention does, with its plan."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KV_HEADS, FFN = 24, 16, 4, 4, 32


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, *, bias: bool, sequence_first: bool) -> None:
        super().__init__()
        self.sequence_first = sequence_first
        self.head_dim = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape))
        k = self.k_norm(self.k_proj(hidden_states).view(shape))
        v = self.v_proj(hidden_states).view(shape)
        order = (1, 2, 0, 3) if self.sequence_first else (0, 2, 1, 3)
        q, k, v = (x.permute(order) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        back = (2, 0, 1, 3) if self.sequence_first else (0, 2, 1, 3)
        return self.o_proj(out.permute(back).reshape(*hidden_states.shape[:-1], -1))


class MLP(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, FFN, bias=bias)
        self.up_proj = nn.Linear(WIDTH, FFN, bias=bias)
        self.down_proj = nn.Linear(FFN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, *, bias: bool, sequence_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(WIDTH)
        self.self_attn = Attention(bias=bias, sequence_first=sequence_first)
        self.dropout = nn.Dropout(dropout)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(bias=bias)
        self.gain = nn.Parameter(torch.rand(WIDTH))  # unplanned, works on shards

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        x = x + self.dropout(self.self_attn(hidden_states=self.input_layernorm(x)))
        return x * (1 + 0.1 * self.gain) + self.mlp(self.post_attention_layernorm(x))


class ToyDecoder(nn.Module):
    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Attention": {
            "q_proj": "col",
            "k_proj": "col",
            "v_proj": "col",
            "o_proj": "row",
            "q_norm": "head_norm",
            "k_norm": "head_norm",
        },
        "MLP": {"gate_proj": "col", "up_proj": "col", "down_proj": "row"},
        "ToyDecoder": {"embed_tokens": "vocab", "lm_head": "loss_parallel"},
    }
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Block": {
            "input_layernorm": "sequence",
            "post_attention_layernorm": "sequence",
            "dropout": "sequence",
        },
        "ToyDecoder": {"embed_tokens": "vocab_sequence", "norm": "sequence"},
    }

    def __init__(
        self,
        *,
        layers: int = 2,
        bias: bool = True,
        tied: bool = True,
        sequence_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.sequence_first = sequence_first
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(
            [Block(bias=bias, sequence_first=sequence_first, dropout=dropout) for _ in range(layers)]
        )
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of [B, T] tokens; [T, B] for a sequence-first model."""
        x = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class ToyDecoderFirst(ToyDecoder):
    """Hidden states [sequence, batch, hidden]."""

    SEQUENCE_PARALLEL_SEQUENCE_DIM = 0
    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        **{name: plan for name, plan in ToyDecoder.TP_MODULE_CONFIG.items() if name != "ToyDecoder"},
        "ToyDecoderFirst": ToyDecoder.TP_MODULE_CONFIG["ToyDecoder"],
    }
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Block": ToyDecoder.SEQUENCE_PARALLEL_MODULE_CONFIG["Block"],
        "ToyDecoderFirst": ToyDecoder.SEQUENCE_PARALLEL_MODULE_CONFIG["ToyDecoder"],
    }

    def __init__(self, **options: object) -> None:
        super().__init__(sequence_first=True, **options)
