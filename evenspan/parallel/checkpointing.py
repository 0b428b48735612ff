"""Activation checkpointing that repeats cheap arithmetic, never an exchange and never attention.

Recomputing a block would send its tokens around again (LongLive: 12 exchanges a layer instead of 4) and
would compute attention, the quadratic part, twice. So the operators' outputs are kept, and only what lies
between them is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from evenspan.comm.meter import CommMeter, active_meter, counting_into

CheckpointingMode = Literal["none", "selective", "full"]

ATTENTION_OPERATORS: frozenset[str] = frozenset(
    {
        "evenspan::attend",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "flex_attention",
    }
)
"""Forward attention of every executor, by operator name without overload."""

_MATMULS: frozenset[str] = frozenset({"aten::mm", "aten::addmm"})


def apply_activation_checkpointing(blocks: Iterable[nn.Module], *, mode: CheckpointingMode) -> None:
    """Makes every block recompute its activations in backward; parameter names and outputs stay the same.

    `none`: nothing is recomputed. `full`: everything but exchanges and attention is. `selective`: the
    outputs of linear layers that do not widen their input are kept too (query, key, value, output and second
    feed-forward projections), so what is recomputed is the wide feed-forward activation, norms and
    modulation. Backward may run outside any context. Apply before FSDP2.
    """
    if mode == "none":
        return
    keep = _keeps_linears if mode == "selective" else _keeps_exchanges_and_attention
    for block in blocks:
        checkpoint(block, context_fn=_contexts(keep))


def _contexts(
    keep: Callable[[Any, tuple[Any, ...]], bool],
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    def policy(context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        del context
        return CheckpointPolicy.MUST_SAVE if keep(operator, args) else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recompute = create_selective_checkpoint_contexts(policy)
        return forward, _recomputing(recompute, active_meter())

    return contexts


@contextmanager
def _recomputing(recompute: AbstractContextManager[Any], meter: CommMeter | None) -> Iterator[None]:
    """Recomputes under the forward's meter, so a repeated exchange would show in its count."""
    with counting_into(meter), recompute:
        yield


def _keeps_exchanges_and_attention(operator: Any, args: tuple[Any, ...]) -> bool:
    del args
    name = operator.name().split(".")[0]
    return name == "evenspan::exchange" or name in ATTENTION_OPERATORS


def _keeps_linears(operator: Any, args: tuple[Any, ...]) -> bool:
    if _keeps_exchanges_and_attention(operator, args):
        return True
    if operator.name().split(".")[0] not in _MATMULS:
        return False
    weight_IO: Tensor = args[-1]
    return isinstance(weight_IO, torch.Tensor) and weight_IO.shape[1] <= weight_IO.shape[0]
