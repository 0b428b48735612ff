"""Context parallelism: attention cores that exchange tokens for heads before, and heads for tokens after.

The model is untouched except for one parameter-free child of each self-attention, so state-dict keys and
the model's code stay those of one device. Cross-attention reads replicated text and stays local.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from evenspan.attention.core import AttentionCore
from evenspan.attention.spans import SpanTable
from evenspan.comm.exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from evenspan.comm.heads import check_heads
from evenspan.errors import ModelError


class UlyssesCore(AttentionCore):
    """A core that computes `inner` on all tokens of H/P heads; `table` covers the tokens of all P ranks.

    The token order inside is rank order: rank 0's tokens, rank 1's, ... (for teacher forcing
    c0 n0 c1 n1 ...). Two exchanges forward, two backward.
    """

    def __init__(self, inner: AttentionCore, *, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, table: SpanTable) -> Tensor:
        """[B, T, H, D] of this rank's tokens -> [B, T, H, D], having attended to every rank's tokens."""
        q, k, v = scatter_heads_gather_tokens(q_BTHD, k_BTHD, v_BTHD, group=self.group)
        return scatter_tokens_gather_heads(self.inner(q, k, v, table), group=self.group)

    def extra_repr(self) -> str:
        """The group's size, for `print(model)`."""
        return f"ranks={self.group.size()}"


def apply_context(
    self_attentions: Iterable[nn.Module], *, group: dist.ProcessGroup | None, heads: int
) -> int:
    """Puts an exchange around the `core` child of every self-attention; the number of cores replaced.

    None, a group of one, changes nothing, so one rank runs exactly the unsplit code. Raises X101 when the
    group's size does not divide `heads`, M401 for a module whose `core` is no AttentionCore, or none given.
    """
    if group is None:
        return 0
    check_heads(heads, ranks=group.size())
    replaced = 0
    for attention in self_attentions:
        core = dict(attention.named_children()).get("core")
        if not isinstance(core, AttentionCore) or isinstance(core, UlyssesCore):
            raise ModelError(
                "M401",
                f"{type(attention).__name__}.core is {type(core).__name__}, not a local AttentionCore",
                hint="give each self-attention a child `core` made by attention_core(), and parallelize once",
            )
        attention.register_module("core", UlyssesCore(core, group=group))
        replaced += 1
    if not replaced:
        raise ModelError(
            "M401",
            f"no self-attention to spread over {group.size()} context ranks",
            hint="pass blocks[i].attn1 of every block",
        )
    return replaced
