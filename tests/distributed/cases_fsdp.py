"""What ranks run for the tests of FSDP2, accumulation and clipping."""

import math

import torch
from torch.distributed.fsdp import FSDPModule

from evenspan.parallel.apply import parallelize
from evenspan.parallel.clip import clip_grad_norm
from evenspan.parallel.fsdp import set_requires_gradient_sync
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import build_topology
from tests.distributed import toy
from tests.distributed.cases_context import relative_error

COUNT = 64.0


def _sharded(ctx, degrees, **settings):
    topology = build_topology(Degrees(**degrees), device=ctx.device)
    model = toy.toy()
    parallelize(
        model,
        topology,
        blocks=model.blocks,
        heads=toy.HEADS,
        **{"mixed_precision": "fp64", "activation_checkpointing": "full", **settings},
    )
    return model, topology


def _backward(model, topology, sample, dtype=torch.float64):
    place = topology.coordinates
    loss, _, _ = toy.loss_sum(model, sample, rank=place.context, ranks=topology.degrees.context)
    (loss / COUNT).to(dtype).backward()
    return loss.detach() / COUNT


def _errors(model, samples, factor=1.0):
    _, want = toy.reference(samples, count=COUNT)
    return {
        name: relative_error(p.grad.full_tensor().double(), factor * want[name])
        for name, p in model.named_parameters()
    }


def two_backwards(ctx, degrees, settings):
    """Gradient errors after one backward, and after a second without zero_grad."""
    model, topology = _sharded(ctx, degrees, **settings)
    samples = range(topology.degrees.dp)
    _backward(model, topology, topology.coordinates.dp)
    first = _errors(model, samples)
    _backward(model, topology, topology.coordinates.dp)
    return max(first.values()), max(_errors(model, samples, 2.0).values())


def averaged(ctx):
    """The largest gradient error of a model whose FSDP2 takes means, its default, instead of sums."""
    model, topology = _sharded(ctx, {"context": ctx.world_size})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(ctx.world_size))
    _backward(model, topology, topology.coordinates.dp)
    return max(_errors(model, range(topology.degrees.dp)).values())


def accumulation(ctx, degrees):
    """Error after three micro-steps of which only the last reduces, and whether gradients appeared early."""
    model, topology = _sharded(ctx, degrees)
    dp = topology.degrees.dp
    early = []
    for micro in range(3):
        set_requires_gradient_sync(model, micro == 2)
        _backward(model, topology, micro * dp + topology.coordinates.dp)
        early.append(sum(p.grad is not None for p in model.parameters()))
    return early, max(_errors(model, range(3 * dp)).values())


def clipping(ctx, degrees, max_norm):
    """Norm and clipped gradients against one process, and the norm after clipping."""
    model, topology = _sharded(ctx, degrees)
    _backward(model, topology, topology.coordinates.dp)
    norm = clip_grad_norm(model.parameters(), max_norm=max_norm)
    after = clip_grad_norm(model.parameters(), max_norm=math.inf)

    _, want = toy.reference(range(topology.degrees.dp), count=COUNT)
    reference = toy.toy()
    for name, parameter in reference.named_parameters():
        parameter.grad = want[name]
    want_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    errors = [
        relative_error(p.grad.full_tensor(), q.grad)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    naive = math.sqrt(sum(float(p.grad.to_local().square().sum()) for p in model.parameters()))
    return float(norm), float(want_norm), float(after), max(errors), naive


def unsynced_norm_of_nan(ctx):
    """The norm when one rank's gradient is not a number: not finite, on every rank."""
    model, topology = _sharded(ctx, {"shard": ctx.world_size})
    _backward(model, topology, topology.coordinates.dp)
    if ctx.rank == 0:
        model.head.weight.grad.to_local().view(-1)[0] = math.nan
    return math.isfinite(clip_grad_norm(model.parameters(), max_norm=1.0))


def precision(ctx, mixed_precision):
    """Types of parameters, gradients and compute, and the gradient error against fp64."""
    model, topology = _sharded(ctx, {"context": ctx.world_size}, mixed_precision=mixed_precision)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    _backward(model, topology, topology.coordinates.dp, dtype=torch.float32)
    errors = _errors(model, range(topology.degrees.dp))
    types = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return types, set(seen), max(errors.values())


def state_dict_keys(ctx):
    """Keys of a parallelized model against the plain one's."""
    model, _ = _sharded(ctx, {"context": ctx.world_size}, activation_checkpointing="selective")
    return list(model.state_dict()) == list(toy.toy().state_dict())
