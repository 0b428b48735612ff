"""The parts of the Wan DiT: attention, feed-forward, one block, and the conditioning embedders.

Parameter names and shapes are those of diffusers' WanTransformer3DModel, so its weights load strictly.
Shape letters: B batch, T tokens, S tokens per frame, N prompts, L text tokens, E width, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenspan.attention.core import AttentionCore
from evenspan.attention.spans import SpanTable
from evenspan.model.numerics import WideLayerNorm, WideLinear, WideRMSNorm, at_least_fp32
from evenspan.model.rope import apply_rope
from evenspan.model.wan_config import WanConfig


class LayerCache(Protocol):
    """Keys and values of earlier frames for one layer of a rollout."""

    def extend(self, k_BTHD: Tensor, v_BTHD: Tensor) -> tuple[Tensor, Tensor]:
        """The cached keys and values followed by the given ones, along T."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Tokens [start, stop) that read prompt `prompt`; of sample `sample`, or of every sample when None."""

    sample: int | None
    start: int
    stop: int
    prompt: int


def prompt_runs(
    rows: Sequence[Sequence[int]], *, copies: int, tokens_per_frame: int
) -> tuple[PromptRun, ...]:
    """Maximal runs of tokens with one prompt, in token order, from the prompt of each frame of each sample.

    `copies` is 2 for [clean | noisy] tokens. Samples with equal maps share their runs, so the usual batch
    costs one attention call per prompt.
    """
    shared = all(list(row) == list(rows[0]) for row in rows)
    runs: list[PromptRun] = []
    for sample, row in enumerate(rows[:1] if shared else rows):
        owner = None if shared else sample
        start = 0
        prompts = list(row) * copies
        for frame in range(1, len(prompts) + 1):
            if frame == len(prompts) or prompts[frame] != prompts[start]:
                runs.append(
                    PromptRun(owner, start * tokens_per_frame, frame * tokens_per_frame, prompts[start])
                )
                start = frame
    return tuple(runs)


class WanAttention(nn.Module):
    """Projections and q/k norms shared by both kinds of attention."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.num_attention_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        # Over all heads together, before they are split: upstream's "rms_norm_across_heads".
        self.norm_q = WideRMSNorm(width, eps=config.eps)
        self.norm_k = WideRMSNorm(width, eps=config.eps)

    def split_heads(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., H, D], no copy."""
        return x.unflatten(-1, (self.heads, -1))


class SelfAttention(WanAttention):
    """Attention over the tokens; what is visible to what is the table's business."""

    def __init__(self, config: WanConfig, *, core: AttentionCore) -> None:
        super().__init__(config)
        self.core = core

    def forward(
        self,
        x_BTE: Tensor,
        *,
        rope: tuple[Tensor, Tensor],
        table: SpanTable,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        q_BTHD = apply_rope(self.split_heads(self.norm_q(self.to_q(x_BTE))), *rope)
        k_BTHD = apply_rope(self.split_heads(self.norm_k(self.to_k(x_BTE))), *rope)
        v_BTHD = self.split_heads(self.to_v(x_BTE))
        if cache is not None:
            k_BTHD, v_BTHD = cache.extend(k_BTHD, v_BTHD)
        out: Tensor = self.to_out[0](self.core(q_BTHD, k_BTHD, v_BTHD, table).flatten(2))
        return out


class CrossAttention(WanAttention):
    """Attention from each frame's tokens to the text of its own prompt. Padding text is read, as upstream."""

    def forward(self, x_BTE: Tensor, *, text_BNLE: Tensor, runs: Sequence[PromptRun]) -> Tensor:
        """[B, T, E] -> [B, T, E]; `runs` cover T in order."""
        q_BTHD = self.split_heads(self.norm_q(self.to_q(x_BTE)))
        k_BNLHD = self.split_heads(self.norm_k(self.to_k(text_BNLE)))
        v_BNLHD = self.split_heads(self.to_v(text_BNLE))
        by_owner: dict[int | None, list[Tensor]] = {}
        for run in runs:
            samples = slice(None) if run.sample is None else slice(run.sample, run.sample + 1)
            out_BHTD = functional.scaled_dot_product_attention(
                q_BTHD[samples, run.start : run.stop].transpose(1, 2),
                k_BNLHD[samples, run.prompt].transpose(1, 2),
                v_BNLHD[samples, run.prompt].transpose(1, 2),
            )
            by_owner.setdefault(run.sample, []).append(out_BHTD.transpose(1, 2))
        out_BTHD = _cat([_cat(parts, dim=1) for parts in by_owner.values()], dim=0)
        out: Tensor = self.to_out[0](out_BTHD.flatten(2))
        return out


class GeluProjection(nn.Module):
    """Linear and tanh-GELU; a module of its own only because its weights are called `net.0.proj`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """E -> ffn_dim -> E."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        # The empty middle keeps the name net.2 of the second projection (dropout upstream, never used).
        self.net = nn.Sequential(
            GeluProjection(config.width, config.ffn_dim),
            nn.Identity(),
            nn.Linear(config.ffn_dim, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class WanBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward; the outer two modulated and gated per frame."""

    def __init__(self, config: WanConfig, *, core: AttentionCore) -> None:
        super().__init__()
        width = config.width
        self.norm1 = WideLayerNorm(width, config.eps, elementwise_affine=False)
        self.attn1 = SelfAttention(config, core=core)
        self.attn2 = CrossAttention(config)
        self.norm2 = WideLayerNorm(width, config.eps) if config.cross_attn_norm else nn.Identity()
        self.ffn = FeedForward(config)
        self.norm3 = WideLayerNorm(width, config.eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, width) / math.sqrt(width))

    def forward(
        self,
        x_BTE: Tensor,
        *,
        modulation_BF6E: Tensor,
        text_BNLE: Tensor,
        rope: tuple[Tensor, Tensor],
        runs: Sequence[PromptRun],
        table: SpanTable,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, E] -> [B, T, E]; F in `modulation_BF6E` counts clean and noisy frames, in token order."""
        modulation = at_least_fp32(self.scale_shift_table) + at_least_fp32(modulation_BF6E)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.unbind(2)
        hidden = modulate(self.norm1(x_BTE), shift_BFE=shift, scale_BFE=scale).to(x_BTE.dtype)
        x_BTE = add_gated(x_BTE, self.attn1(hidden, rope=rope, table=table, cache=cache), gate_BFE=gate)
        hidden = self.norm2(x_BTE).to(x_BTE.dtype)
        x_BTE = x_BTE + self.attn2(hidden, text_BNLE=text_BNLE, runs=runs)
        hidden = modulate(self.norm3(x_BTE), shift_BFE=ffn_shift, scale_BFE=ffn_scale).to(x_BTE.dtype)
        return add_gated(x_BTE, self.ffn(hidden), gate_BFE=ffn_gate)


class TimeEmbedder(nn.Module):
    """Sinusoid -> linear, SiLU, linear, in at least fp32."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.linear_1 = WideLinear(config.freq_dim, config.width)
        self.linear_2 = WideLinear(config.width, config.width)

    def forward(self, sinusoid: Tensor) -> Tensor:
        out: Tensor = self.linear_2(functional.silu(self.linear_1(sinusoid)))
        return out


class TextEmbedder(nn.Module):
    """Text encoder width -> linear, tanh-GELU, linear -> E."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.text_dim, config.width)
        self.linear_2 = nn.Linear(config.width, config.width)

    def forward(self, text: Tensor) -> Tensor:
        hidden = functional.gelu(self.linear_1(text.to(self.linear_1.weight.dtype)), approximate="tanh")
        out: Tensor = self.linear_2(hidden)
        return out


class ConditionEmbedder(nn.Module):
    """Timesteps and text to what the blocks and the head read."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = TimeEmbedder(config)
        self.time_proj = WideLinear(config.width, 6 * config.width)
        self.text_embedder = TextEmbedder(config)

    def forward(self, timesteps_BF: Tensor, text_BNLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """e [B, F, E] and e0 [B, F, 6, E] in at least fp32, and text [B, N, L, E]."""
        e_BFE = self.time_embedder(sinusoid(timesteps_BF, width=self.freq_dim))
        e0_BF6E = self.time_proj(functional.silu(e_BFE)).unflatten(-1, (6, -1))
        return e_BFE, e0_BF6E, self.text_embedder(text_BNLE)


class PatchEmbedding(nn.Module):
    """The strided Conv3d of upstream as one matrix product over patches; token order f, h, w."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        fan_in = config.in_channels * math.prod(config.patch_size)
        self.weight = nn.Parameter(torch.empty(config.width, config.in_channels, *config.patch_size))
        self.bias = nn.Parameter(torch.zeros(config.width))
        nn.init.uniform_(self.weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, patches_BTC: Tensor) -> Tensor:
        """[B, T, C * ph * pw] (feature order c, ph, pw) -> [B, T, E]."""
        return functional.linear(patches_BTC.to(self.weight.dtype), self.weight.flatten(1), self.bias)


def sinusoid(timesteps: Tensor, *, width: int) -> Tensor:
    """[cos | sin] of t * 10000^(-i / half), i < half = width / 2, in fp64: [..., width]."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angles = timesteps.to(torch.float64)[..., None] / 10000.0**exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def modulate(x_BTE: Tensor, *, shift_BFE: Tensor, scale_BFE: Tensor) -> Tensor:
    """x (1 + scale) + shift with each frame's own shift and scale; one fused op, one saved activation."""
    per_frame = x_BTE.unflatten(1, (shift_BFE.shape[1], -1))
    return torch.addcmul(shift_BFE[:, :, None], per_frame, 1.0 + scale_BFE[:, :, None]).flatten(1, 2)


def add_gated(x_BTE: Tensor, update_BTE: Tensor, *, gate_BFE: Tensor) -> Tensor:
    """x + gate * update with each frame's own gate, in at least fp32, returned in the dtype of `x_BTE`."""
    frames = gate_BFE.shape[1]
    x, update = (at_least_fp32(part).unflatten(1, (frames, -1)) for part in (x_BTE, update_BTE))
    return torch.addcmul(x, update, gate_BFE[:, :, None]).flatten(1, 2).to(x_BTE.dtype)


def _cat(parts: list[Tensor], *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
