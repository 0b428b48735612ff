"""What one decoder block on the tensor axis keeps for backward, sends and takes, at T = 2 and 4. Table last.

    python -m benchmarks.tensor [--steps N]

Rows: one process; tensor parallelism alone; with sequence parallelism; the same keeping only shards
(`save: shard`); and the reference, torch's own styles with one gather per linear. Numbers are of one block,
forward and backward: the difference between stacks of three and of two blocks. A unit is the bytes of one
hidden state, B x S x h x 4; saved is what lives between forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenspan.comm.meter import CommMeter
from evenspan.parallel.tensor import apply_tensor_plan
from evenspan.testing import RankContext, RankPool
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology

BATCH, TOKENS, WIDTH, HEADS = 2, 256, 128, 4
PLANS = ("tensor parallel", "sequence parallel", "save: shard", "gather per linear")
BARS = {2: 10.02, 4: 6.01}
"""Saved units of a block with sequence parallelism, at most."""


class Norm(nn.Module):
    """RMS norm in plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal attention that takes its shape from what its projections return."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(), Attention()
        self.mlp_norm, self.mlp = Norm(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Blocks between an entry and an exit."""

    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Attention": {"q_proj": "col", "k_proj": "col", "v_proj": "col", "o_proj": "row"},
        "MLP": {"gate_proj": "col", "up_proj": "col", "down_proj": "row"},
    }
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "Stack": {"entry": "split", "exit": "gather_output"},
        "Block": {"attention_norm": "sequence", "mlp_norm": "sequence"},
    }

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.entry, self.exit = nn.Identity(), nn.Identity()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, h] -> [B, S, h]."""
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


class ShardStack(Stack):
    """A stack that keeps only shards of what it gathers."""

    TP_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        name: {"self": {"mode": "gather", "save": "shard"}, **entries}
        for name, entries in Stack.TP_MODULE_CONFIG.items()
    }
    SEQUENCE_PARALLEL_MODULE_CONFIG: ClassVar[dict[str, Any]] = {
        "ShardStack": {"entry": "split", "exit": "gather_output"},
        "Block": Stack.SEQUENCE_PARALLEL_MODULE_CONFIG["Block"],
    }


class LiveStorages(TorchDispatchMode):
    """Knows every storage that was made while it is active, by a weak reference; parameters do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._parameters = {
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).untyped_storage()._cdata
            for parameter in model.parameters()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operator returns; distributed tensors are seen as their local parts."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._parameters:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        """Bytes of the noted storages that still exist."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def stack(plan: str, blocks: int, ctx: RankContext) -> nn.Module:
    """A stack of blocks under one of the plans, on all ranks of the pool."""
    torch.manual_seed(0)
    model = (ShardStack if plan == "save: shard" else Stack)(blocks)
    if ctx.world_size == 1:
        return model
    mesh = build_topology(Degrees(tensor=ctx.world_size), device=ctx.device).tensor_mesh
    assert mesh is not None
    if plan != "gather per linear":
        apply_tensor_plan(model, mesh, sequence_parallel=plan != "tensor parallel")
        return model
    into = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q_proj", "k_proj", "v_proj")}
    wide = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate_proj", "up_proj")}
    for block in model.blocks:
        assert isinstance(block, Block)
        parallelize_module(
            block.attention, mesh, {**into, "o_proj": RowwiseParallel(output_layouts=Shard(1))}
        )
        parallelize_module(block.mlp, mesh, {**wide, "down_proj": RowwiseParallel(output_layouts=Shard(1))})
        parallelize_module(
            block, mesh, {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        )
    return model


def block_input(plan: str, ctx: RankContext) -> Tensor:
    """[B, S, h]; this rank's shard where torch's styles want one."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    if plan == "gather per linear" and ctx.world_size > 1:
        x = x.chunk(ctx.world_size, dim=1)[ctx.rank].clone()
    return x.requires_grad_()


def totals(ctx: RankContext, plan: str, blocks: int) -> dict[str, float]:
    """What a stack of so many blocks saves, sends and calls in one forward and backward."""
    model, x = stack(plan, blocks, ctx), block_input(plan, ctx)
    live, torch_counts = LiveStorages(model), CommDebugMode()
    with CommMeter() as meter, torch_counts:
        with live:
            out = model(x)
            loss = out.square().sum()
            del out
        time.sleep(0.2)  # gloo's threads let go of what they sent a little later
        saved = live.live_bytes()
        loss.backward()
    counts = {str(getattr(name, "__name__", name)): n for name, n in torch_counts.get_comm_counts().items()}
    found: dict[str, float] = {"saved": saved, "calls": sum(counts.values())}
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        short = kind.replace("_", "")
        found[kind] = sum(n for name, n in counts.items() if short in name.replace("_", ""))
        found[f"metered {kind}"] = meter.calls(kind)
    found["bytes"] = meter.bytes_sent()
    return found


def of_one_block(ctx: RankContext, plan: str) -> dict[str, float]:
    """The same of one block; `saved` in units."""
    three, two = (totals(ctx, plan, blocks) for blocks in (3, 2))
    found = {name: three[name] - two[name] for name in three}
    found["saved"] /= BATCH * TOKENS * WIDTH * 4
    return found


def step_seconds(ctx: RankContext, plans: tuple[str, ...], steps: int) -> dict[str, float]:
    """The fastest forward and backward of three blocks under each plan, the plans in turns."""
    cases = {plan: (stack(plan, 3, ctx), block_input(plan, ctx)) for plan in plans}
    seconds: dict[str, list[float]] = {plan: [] for plan in plans}
    for step in range(steps + 2):
        for plan, (model, x) in cases.items():
            started = time.perf_counter()
            model(x).square().sum().backward()
            if step > 1:
                seconds[plan].append(time.perf_counter() - started)
    return {plan: statistics.median(values) for plan, values in seconds.items()}


def main() -> None:
    """Measure every plan at every degree and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    rows: list[tuple[int, str, dict[str, float], float]] = []
    for ranks in (1, 2, 4):
        plans = PLANS if ranks > 1 else ("one process",)
        pool = RankPool(ranks)
        seconds = pool.run(step_seconds, plans, steps)
        for plan in plans:
            taken = max(found[plan] for found in seconds)
            rows.append((ranks, plan, pool.run(of_one_block, plan)[0], taken))
        pool.close()
    print(f"one block: B {BATCH}, S {TOKENS}, h {WIDTH}, {HEADS} heads, FFN {2 * WIDTH}, fp32, gloo; "
          f"time of three blocks, median of {steps}")  # fmt: skip
    print(f"{'T':>2} {'plan':<18}{'saved units':>12}{'bar':>7}{'AG':>4}{'RS':>4}{'AR':>4}{'all':>5}"
          f"{'bytes sent':>12}{'closed form':>13}{'ms':>8}")  # fmt: skip
    for ranks, plan, found, seconds_taken in rows:
        closed = 8 * WIDTH * BATCH * TOKENS * 4 * (ranks - 1) // ranks
        bar = f"{BARS[ranks]:.2f}" if plan == "sequence parallel" else ""
        sent = f"{found['bytes']:,.0f}" if plan != "gather per linear" else f"({14 * closed // 8:,})"
        print(f"{ranks:>2} {plan:<18}{found['saved']:>12.3f}{bar:>7}{found['all_gather']:>4.0f}"
              f"{found['reduce_scatter']:>4.0f}{found['all_reduce']:>4.0f}{found['calls']:>5.0f}"
              f"{sent:>12}{closed:>13,}{seconds_taken * 1e3:>8.1f}")  # fmt: skip
    print("in brackets: by the closed form, torch's own collectives are not metered")


if __name__ == "__main__":
    main()
