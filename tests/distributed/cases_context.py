"""What ranks run for the tests of context parallelism and its checkpointing."""

import contextlib

import torch
import torch.distributed as dist

from evenspan.comm.exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from evenspan.comm.meter import CommMeter
from evenspan.parallel.apply import parallelize
from evenspan.parallel.context import UlyssesCore
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed import toy

_PLAIN_FORWARD = UlyssesCore.forward


def _detached_v(self, q, k, v, table):
    q, k, v = scatter_heads_gather_tokens(q, k, v.detach(), group=self.group)
    return scatter_tokens_gather_heads(self.inner(q, k, v, table), group=self.group)


@contextlib.contextmanager
def _mutant(name):
    UlyssesCore.forward = _detached_v if name == "detached_v" else _PLAIN_FORWARD
    try:
        yield
    finally:
        UlyssesCore.forward = _PLAIN_FORWARD


def relative_error(got, want):
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-300))


def parity(ctx, degrees, mode, mutant):
    """The largest relative errors of output, input gradient and parameter gradients, and counted traffic."""
    topology = build_topology(Degrees(**degrees), device=ctx.device)
    place, ranks = topology.coordinates, topology.degrees.context
    model = toy.toy()
    keys = list(model.state_dict())
    parallelize(
        model,
        topology,
        blocks=model.blocks,
        heads=toy.HEADS,
        activation_checkpointing=mode,
        mixed_precision="fp64",
    )
    keys_kept = keys == list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    with _mutant(mutant):
        with CommMeter() as meter:
            loss, x, out = toy.loss_sum(
                model, place.dp, rank=place.context, ranks=ranks, local_positions=mutant == "local_positions"
            )
            forward = meter.calls("exchange")
        count = topology.degrees.dp * toy.batch(0)[0].numel()
        (loss / count).backward()
    want, want_grads = toy.reference(range(topology.degrees.dp), count=count)
    total = loss.detach() / count
    dist.all_reduce(total, group=topology.loss_group)
    ref_model = toy.toy()
    ref_loss, ref_x, ref_out = toy.loss_sum(ref_model, place.dp)
    (ref_loss / count).backward()
    clean, noisy = (toy.share(half, place.context, ranks) for half in ref_x.grad.chunk(2, dim=1))
    grads = {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        for name, p in model.named_parameters()
    }
    return {
        "loss": abs(float(total) - want) / want,
        "output": relative_error(out.detach(), toy.share(ref_out.detach(), place.context, ranks)),
        "input_grad": relative_error(x.grad, torch.cat([clean, noisy], dim=1)),
        "param_grads": {name: relative_error(grads[name], want_grads[name]) for name in want_grads},
        "exchanges": (forward, meter.calls("exchange") - forward),
        "bytes": meter.bytes_sent("exchange"),
        "traffic": list(meter.traffic),
        "keys_kept": keys_kept,
    }


def saved_bytes(ctx, mode):
    """Bytes of activations alive between forward and backward, besides the loss."""
    topology = build_topology(Degrees(shard=1, context=ctx.world_size), device=ctx.device)
    model = toy.toy()
    parallelize(
        model,
        topology,
        blocks=model.blocks,
        heads=toy.HEADS,
        activation_checkpointing=mode,
        mixed_precision="fp64",
    )
    operators = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(func.name().split(".")[0])
            return func(*args, **(kwargs or {}))

    loss, _, _ = toy.loss_sum(model, 0, rank=ctx.rank, ranks=ctx.world_size)
    with Log():
        loss.backward()
    names = ("evenspan::attend", "evenspan::exchange", "aten::addmm", "aten::gelu")
    return {name: operators.count(name) for name in names}
