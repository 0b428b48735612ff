"""Cores by name, and selective checkpointing that never computes attention twice."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from evenspan.attention import core as cores
from evenspan.attention import patterns
from evenspan.attention.core import AttentionCore, attention_core, attention_ops
from evenspan.attention.segments import attend
from evenspan.errors import AttentionError

TABLE = patterns.teacher_forcing([(0, 4), (4, 8)], frame_per_block=2).scaled(2)


class CountOps(TorchDispatchMode):
    """Counts every operator that runs, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


class Layer(torch.nn.Module):
    """Projections, a core, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.out = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.core = attention_core("segments")

    def forward(self, x_BTE: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTE).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(self.core(q, k, v, TABLE).flatten(2))


def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in attention_ops() else CheckpointPolicy.PREFER_RECOMPUTE


def run(layer: Layer, mode: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    torch.manual_seed(0)
    x = torch.randn(1, TABLE.q_tokens, 16, dtype=torch.float64, requires_grad=True)
    layer.zero_grad()
    with CountOps() as ops:
        match mode:
            case "none":
                out = layer(x)
            case "full":
                out = checkpoint(layer, x, use_reentrant=False)
            case "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, policy)
                out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        out.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}, ops.counts


def test_selective_checkpointing_keeps_the_core() -> None:
    torch.manual_seed(1)
    layer = Layer()
    expected, plain = run(layer, "none")
    forward, projection = "evenspan.attend.default", "aten.addmm.default"
    assert plain[forward] == 1
    for mode, cores_run in (("full", 2), ("selective", 1)):
        got, counts = run(layer, mode)
        assert counts[forward] == cores_run
        assert counts["evenspan.attend_backward.default"] == 1
        assert counts[projection] > plain[projection]  # the cheap part is computed again
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_attention_ops_names_the_core() -> None:
    assert attend._opoverload in attention_ops()
    assert all(isinstance(op, torch._ops.OpOverload) for op in attention_ops())


@pytest.mark.parametrize("kind", cores.KINDS)
def test_every_kind_has_a_parameter_free_core(kind: str) -> None:
    core = attention_core(kind)
    assert isinstance(core, AttentionCore)
    assert not core.state_dict()
    assert not list(core.parameters())


@pytest.mark.parametrize("kind", ["auto", "dense", "segments"])
def test_cores_agree_on_the_cpu(kind: str) -> None:
    q, k, v = torch.randn(
        3, 2, TABLE.q_tokens, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = attention_core("dense")(q, k, v, TABLE)
    torch.testing.assert_close(attention_core(kind)(q, k, v, TABLE), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_cuda_cores_say_so_on_the_cpu(kind: str) -> None:
    q = torch.zeros(1, TABLE.q_tokens, 2, 8)
    with pytest.raises(
        AttentionError, match=f"A301 the {kind} core was called with tensors on cpu"
    ) as caught:
        attention_core(kind)(q, q, q, TABLE)
    assert "segments" in caught.value.hint


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(AttentionError, match=r"A202 .*'segment'") as caught:
        attention_core("segment")
    assert caught.value.hint == "use one of segments"


def test_the_base_class_is_abstract() -> None:
    q = torch.zeros(1, TABLE.q_tokens, 2, 8)
    with pytest.raises(NotImplementedError):
        AttentionCore()(q, q, q, TABLE)
