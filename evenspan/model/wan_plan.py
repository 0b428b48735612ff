"""The tensor plan of the causal Wan: which projections are split, and where tokens are cut and joined.

Between `patch_embedding` and `tokens_exit` each rank holds a shard of the tokens, in whole frames, because
modulation is per frame. Attention and feed-forward gather it once and write it back summed; the heads, with
their exchange over context ranks, and the text keys are split too. The time and text embedders and the head
are repeated by every rank: their work is small.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from evenspan.errors import PlanError
from evenspan.model.wan_blocks import WanAttention
from evenspan.topology.degrees import divisors


class Ranks(Protocol):
    """What a postprocessor reads of the tensor mesh."""

    def size(self) -> int:
        """The tensor degree."""
        ...


_PROJECTIONS: dict[str, Any] = {
    "to_q": "col",
    "to_k": "col",
    "to_v": "col",
    # Upstream normalises over all heads together, so over the whole width.
    "norm_q": "width_norm",
    "norm_k": "width_norm",
    "to_out.0": "row",
}

TP_MODULE_CONFIG: dict[str, dict[str, Any]] = {
    # Every block reads the text for its own heads: summed here, the text's gradient travels once a step.
    "CausalWan": {"text_entry": {"mode": "replicated", "arguments": {"input": "copy"}}},
    "SelfAttention": {"self": "gather", **_PROJECTIONS},
    "CrossAttention": {"self": {"mode": "gather", "arguments": {"text_BNLE": "keep"}}, **_PROJECTIONS},
    "FeedForward": {"self": "gather", "net.0.proj": "col", "net.2": "row"},
}

SEQUENCE_PARALLEL_MODULE_CONFIG: dict[str, dict[str, Any]] = {
    "CausalWan": {
        "patch_embedding": "split",
        # [B, F, 6, E]: cut by frames once for all blocks.
        "modulation_entry": "split",
        "tokens_exit": "gather_output",
    },
    "WanBlock": {
        "self": {"mode": "sequence", "arguments": {"text_BNLE": "keep"}},
        "norm1": "sequence",
        "norm2": "sequence",
        "norm3": "sequence",
    },
}


def keep_own_heads(module: nn.Module, ranks: Ranks) -> None:
    """Make an attention split its features into this rank's heads. Raises PlanError P106."""
    assert isinstance(module, WanAttention)
    if module.heads % ranks.size():
        raise PlanError(
            "P106",
            f"{type(module).__name__}: {ranks.size()} tensor ranks do not divide {module.heads} heads",
            hint="use a tensor degree of "
            + " or ".join(str(degree) for degree in divisors(module.heads) if degree > 1),
        )
    module.heads //= ranks.size()


TP_MODULE_POSTPROCESSORS = {"SelfAttention": keep_own_heads, "CrossAttention": keep_own_heads}
