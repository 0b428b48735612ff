"""The causal Wan DiT: weights as in diffusers' WanTransformer3DModel, a timestep per latent frame.

Single-device code; attention follows a span table. A rank that holds part of the frames passes their global
positions and a table over all tokens; an exchange, if any, happens inside the parameter-free child
`attn1.core` of each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from evenspan.attention.core import attention_core
from evenspan.attention.spans import SpanTable
from evenspan.errors import ShapeError
from evenspan.model.numerics import WideLayerNorm, at_least_fp32
from evenspan.model.rope import rope_table
from evenspan.model.wan_blocks import (
    ConditionEmbedder,
    LayerCache,
    PatchEmbedding,
    PromptRun,
    WanBlock,
    modulate,
    prompt_runs,
)
from evenspan.model.wan_config import WanConfig
from evenspan.model.wan_plan import (
    SEQUENCE_PARALLEL_MODULE_CONFIG,
    TP_MODULE_CONFIG,
    TP_MODULE_POSTPROCESSORS,
)

__all__ = ["CausalWan", "WanConfig"]


class CausalWan(nn.Module):
    """Predicts the velocity of noisy latent frames, with or without their clean copies beside them."""

    TP_MODULE_CONFIG: ClassVar[Mapping[str, Any]] = TP_MODULE_CONFIG
    TP_MODULE_POSTPROCESSORS: ClassVar[Mapping[str, Any]] = TP_MODULE_POSTPROCESSORS
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[Mapping[str, Any]] = SEQUENCE_PARALLEL_MODULE_CONFIG
    SEQUENCE_PARALLEL_SEQUENCE_DIM: ClassVar[int] = 1

    def __init__(self, config: WanConfig, *, core: str = "auto") -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_embedding = PatchEmbedding(config)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(
            [WanBlock(config, core=attention_core(core)) for _ in range(config.num_layers)]
        )
        self.norm_out = WideLayerNorm(width, config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(width, config.out_channels * math.prod(config.patch_size))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, width) / math.sqrt(width))
        # Where the plan cuts and joins what the blocks read and write; nothing happens on one device.
        self.modulation_entry = nn.Identity()
        self.text_entry = nn.Identity()
        self.tokens_exit = nn.Identity()

    def fp32_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters mixed precision should leave in fp32, as upstream does."""
        return self.condition_embedder.time_embedder, self.condition_embedder.time_proj

    def forward(
        self,
        noisy_BFCHW: Tensor,
        timesteps_BF: Tensor,
        text_BNLE: Tensor,
        *,
        positions_BF: Tensor,
        prompt_of_frame_BF: Tensor,
        table: SpanTable,
        clean_BFCHW: Tensor | None = None,
        clean_timesteps_BF: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Velocity [B, F, C, H, W] of the noisy frames (F local frames; all of them in one process).

        `timesteps_BF` in [0, 1000]; `text_BNLE` N prompts of L text tokens; `positions_BF` global frame
        positions; `prompt_of_frame_BF` the prompt of each frame. With `clean_BFCHW` (at `clean_timesteps_BF`,
        zeros when omitted) the tokens are [clean | noisy], each in order f, h, w, and `table` covers both.
        `caches`, one per block, prepend the keys and values of earlier frames (rollout).
        Raises ShapeError S301, S302 and ModelError M104.
        """
        rows, columns = self._grid(noisy_BFCHW)
        batch, frames = noisy_BFCHW.shape[:2]
        expect_shape("timesteps_BF", timesteps_BF, (batch, frames))
        expect_shape("positions_BF", positions_BF, (batch, frames))
        if clean_BFCHW is not None:
            expect_shape("clean_BFCHW", clean_BFCHW, tuple(noisy_BFCHW.shape))
            if clean_timesteps_BF is None:
                clean_timesteps_BF = torch.zeros_like(timesteps_BF)
            timesteps_BF = torch.cat((clean_timesteps_BF, timesteps_BF), dim=1)
        latents = noisy_BFCHW if clean_BFCHW is None else torch.cat((clean_BFCHW, noisy_BFCHW), dim=1)
        copies = 1 if clean_BFCHW is None else 2

        # First, as it works on whole tensors; the plan cuts tokens at the patch embedding.
        e_BFE, e0_BF6E, text_BNLE = self.condition_embedder(timesteps_BF, text_BNLE)
        text_BNLE = self.text_entry(text_BNLE)
        x_BTE = self.patch_embedding(self._patches(latents))
        e0_BF6E = self.modulation_entry(e0_BF6E)
        rope = rope_table(
            positions_BF,
            rows=rows,
            columns=columns,
            dims=self.config.rope_dims,
            max_positions=self.config.rope_max_seq_len,
            dtype=torch.promote_types(x_BTE.dtype, torch.float32),
        )
        runs = self._runs(prompt_of_frame_BF, text_BNLE, copies=copies, frames=frames, tokens=rows * columns)
        for layer, block in enumerate(self.blocks):
            x_BTE = block(
                x_BTE,
                modulation_BF6E=e0_BF6E,
                text_BNLE=text_BNLE,
                rope=rope,
                runs=runs,
                table=table,
                cache=None if caches is None else caches[layer],
            )
        noisy_tokens = self.tokens_exit(x_BTE)[:, -frames * rows * columns :]
        return self._head(noisy_tokens, e_BFE[:, -frames:], rows=rows, columns=columns)

    def _head(self, x_BTE: Tensor, e_BFE: Tensor, *, rows: int, columns: int) -> Tensor:
        modulation = at_least_fp32(self.scale_shift_table) + e_BFE[:, :, None]
        shift, scale = modulation.unbind(2)
        hidden = modulate(self.norm_out(x_BTE), shift_BFE=shift, scale_BFE=scale).to(x_BTE.dtype)
        _, patch_rows, patch_columns = self.config.patch_size
        return rearrange(
            self.proj_out(hidden),
            "b (f h w) (p q c) -> b f c (h p) (w q)",
            h=rows,
            w=columns,
            p=patch_rows,
            q=patch_columns,
        )

    def _patches(self, latents_BFCHW: Tensor) -> Tensor:
        _, patch_rows, patch_columns = self.config.patch_size
        pattern = "b f c (h p) (w q) -> b (f h w) (c p q)"
        return rearrange(latents_BFCHW, pattern, p=patch_rows, q=patch_columns)

    def _grid(self, latents_BFCHW: Tensor) -> tuple[int, int]:
        """Token rows and columns of one frame."""
        channels, height, width = latents_BFCHW.shape[2:]
        _, patch_rows, patch_columns = self.config.patch_size
        if channels != self.config.in_channels:
            raise ShapeError(
                "S302",
                f"latents of shape {list(latents_BFCHW.shape)} have {channels} channels",
                hint=f"the model reads [B, F, C, H, W] with C = {self.config.in_channels}",
            )
        if height % patch_rows or width % patch_columns:
            legal = [height - height % patch_rows, width - width % patch_columns]
            raise ShapeError(
                "S301",
                f"latent size {height} x {width} is no multiple of the patch {patch_rows} x {patch_columns}",
                hint=f"use for example {max(legal[0], patch_rows)} x {max(legal[1], patch_columns)}",
            )
        return height // patch_rows, width // patch_columns

    def _runs(
        self, prompt_of_frame_BF: Tensor, text_BNLE: Tensor, *, copies: int, frames: int, tokens: int
    ) -> tuple[PromptRun, ...]:
        batch, prompts = text_BNLE.shape[:2]
        expect_shape("prompt_of_frame_BF", prompt_of_frame_BF, (batch, frames))
        rows = prompt_of_frame_BF.tolist()
        used = {prompt for row in rows for prompt in row}
        if min(used) < 0 or max(used) >= prompts:
            raise ShapeError(
                "S302",
                f"prompt_of_frame_BF names prompts {min(used)} to {max(used)}; text_BNLE holds {prompts}",
                hint="each frame's prompt is an index into dimension 1 of text_BNLE",
            )
        return prompt_runs(rows, copies=copies, tokens_per_frame=tokens)


def expect_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ShapeError S302 unless `value` has exactly this shape."""
    if tuple(value.shape) != shape:
        raise ShapeError(
            "S302",
            f"{name} has shape {list(value.shape)}",
            hint=f"expected {list(shape)}, as the noisy latents have",
        )
