"""Hugging Face's Qwen3 for packed documents: its own code, with attention in a parameter-free child `core`.

The child makes it fit `parallel.context`: the exchange wraps `core`, and state-dict keys stay Hugging Face's.
Legend: B samples, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from evenspan.attention.core import AttentionCore, attention_core
from evenspan.attention.patterns import documents
from evenspan.attention.spans import SpanTable
from evenspan.errors import ModelError
from evenspan.model.decoder_config import DecoderConfig, read_decoder_folder
from evenspan.model.numerics import at_least_fp32

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM

ATTENTION_NAME = "evenspan"
"""What the attention function is called in Hugging Face's registry."""


class WideRMSNorm(nn.Module):
    """Qwen3RMSNorm in at least fp32: normalised there, rounded to the input's dtype, then times the gain."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        wide = at_least_fp32(hidden_states)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


class PackedCore(AttentionCore):
    """A core over the samples of a batch laid end to end, so that one table says what all of them see."""

    def __init__(self, inner: AttentionCore) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, table: SpanTable) -> Tensor:
        """[B, T, H, D] -> [B, T, H, D]; `table` is over B x T tokens, as `packed_table` makes it."""
        laid_out = (x.flatten(0, 1).unsqueeze(0) for x in (q_BTHD, k_BTKD, v_BTKD))
        return self.inner(*laid_out, table).squeeze(0).unflatten(0, q_BTHD.shape[:2])


def packed_table(lengths: Sequence[Sequence[int]]) -> SpanTable:
    """Causal attention inside each document; `lengths` are those of every sample over all context ranks."""
    return documents([length for sample in lengths for length in sample])


@lru_cache(maxsize=1)
def decoder_class() -> type[Qwen3ForCausalLM]:
    """Qwen3ForCausalLM with a `core` in each self-attention, and the plan of its tensor axis on the class.

    Its forward takes input_ids and position_ids [B, T], this rank's tokens, and the keyword `span_table` over
    the tokens of all ranks; there is no attention mask. Made on first use, as importing transformers is slow.
    """
    from transformers import AttentionInterface, Qwen3ForCausalLM

    AttentionInterface.register(ATTENTION_NAME, _attend)

    class PackedQwen3ForCausalLM(Qwen3ForCausalLM):
        """Qwen3 on packed documents."""

        TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
            "Qwen3Attention": {
                "q_proj": "col",
                "k_proj": "col",
                "v_proj": "col",
                "q_norm": "head_norm",
                "k_norm": "head_norm",
                "o_proj": "row",
            },
            "Qwen3MLP": {"gate_proj": "col", "up_proj": "col", "down_proj": "row"},
            "Qwen3Model": {"embed_tokens": "vocab"},
            "PackedQwen3ForCausalLM": {"lm_head": "loss_parallel"},
        }
        TP_MODULE_POSTPROCESSORS: ClassVar[dict[str, Any]] = {}
        SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
            "Qwen3DecoderLayer": {"input_layernorm": "sequence", "post_attention_layernorm": "sequence"},
            "Qwen3Model": {"embed_tokens": "vocab_sequence", "norm": "sequence"},
        }
        SEQUENCE_PARALLEL_SEQUENCE_DIM: ClassVar[int] = 1

        def __init__(self, config: Qwen3Config) -> None:
            config._attn_implementation = ATTENTION_NAME
            super().__init__(config)
            widen_norms(self)
            use_cores(self, "auto")

    return PackedQwen3ForCausalLM


def widen_norms(model: nn.Module) -> None:
    """Make the norms of a Qwen3 keep doubles, in place; in fp32 and bf16 they compute what they did."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, Qwen3RMSNorm):
                wide = WideRMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                wide.weight = norm.weight
                parent.register_module(name, wide)


def use_cores(model: nn.Module, kind: str) -> None:
    """Give each self-attention of a decoder a `core` of a kind that `parallel.attention` names, in place."""
    for layer in model.get_submodule("model.layers").children():
        layer.get_submodule("self_attn").add_module("core", PackedCore(attention_core(kind)))


def empty_decoder(config: DecoderConfig) -> Qwen3ForCausalLM:
    """A decoder whose weights are of no meaning yet."""
    return decoder_class()(hugging_face_config(config))


def build_decoder(config: DecoderConfig, *, seed: int) -> Qwen3ForCausalLM:
    """A decoder in fp32 whose weights depend on `seed` and parameter names alone, not on the ranks."""
    model = empty_decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, seed=seed, std=config.initializer_range))
    return model


def load_decoder(folder: str | Path) -> Qwen3ForCausalLM:
    """The decoder of a Hugging Face folder, in fp32; nothing is downloaded.

    Raises ModelError M107 (no such folder, or one that cannot be read), M108, M102, and M202 for weights that
    do not fit its config.json.
    """
    read_decoder_folder(folder)
    try:
        model, info = decoder_class().from_pretrained(
            str(folder), local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            "M107",
            f"{folder} cannot be read: {str(error).splitlines()[0]}",
            hint="give as model_kwargs.model_path a folder of save_pretrained that holds a Qwen3",
        ) from error
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    if wrong:
        faults = "; ".join(
            f"{kind.replace('_', ' ')} {', '.join(names[:4])}" for kind, names in wrong.items()
        )
        raise ModelError(
            "M202",
            f"the weights in {folder} do not fit its config.json: {faults}",
            hint="save the folder again with save_pretrained",
        )
    model.config.use_cache = False
    return model


def hugging_face_config(config: DecoderConfig) -> Qwen3Config:
    """The same sizes as Hugging Face writes them."""
    from transformers import Qwen3Config

    values = dataclasses.asdict(config)
    theta = float(values.pop("rope_theta"))
    return Qwen3Config(
        use_cache=False,
        # Otherwise from 28 layers on a window of 4096 tokens would be theirs to switch on.
        use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **values,
    )


def _attend(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    span_table: SpanTable,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention function: what is seen stands in the table, so there is no mask."""
    assert attention_mask is None, "the span table says what is seen: pass no attention_mask"
    core = module.get_submodule("core")
    return core(*(x.transpose(1, 2) for x in (query_BHTD, key_BKTD, value_BKTD)), span_table), None


def _values(name: str, parameter: nn.Parameter, *, seed: int, std: float) -> Tensor:
    if parameter.ndim == 1:
        return torch.zeros(parameter.shape) if name.endswith(".bias") else torch.ones(parameter.shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return std * torch.randn(parameter.shape, generator=generator)
