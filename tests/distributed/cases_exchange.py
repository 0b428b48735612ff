"""What ranks run for the tests of exchanges and token collectives."""

import torch
import torch.distributed as dist

from evenspan.comm.collectives import Loss, all_reduce_sum, gather_tokens, split_tokens
from evenspan.comm.exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from evenspan.comm.meter import CommMeter
from evenspan.errors import CommError


def _tensor(*shape, seed, stamp=0):
    generator = torch.Generator().manual_seed(1000 * seed + stamp)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def arange_example(ctx):
    """The published example of a scrambled batch: [B, T, heads] = [2, 2, 4], head dim 1."""
    x = (torch.arange(16).view(2, 2, 4) + 16 * ctx.rank).double().unsqueeze(-1)
    q, k, v = scatter_heads_gather_tokens(x, x + 100, x + 200, group=dist.group.WORLD)
    back = scatter_tokens_gather_heads(q, group=dist.group.WORLD)
    return q.squeeze(-1).tolist(), k.squeeze(-1).tolist(), v.squeeze(-1).tolist(), torch.equal(back, x)


def against_naive(ctx, sizes, layout):
    """Exchanged q, k, v against gather-everything-and-slice, and whether inputs and round trip survive."""
    batch, tokens, heads, kv_heads, dim = sizes
    group, ranks = dist.group.WORLD, ctx.world_size
    whole = [
        _tensor(batch, tokens * ranks, n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))
    ]
    mine = [x[:, ctx.rank * tokens : (ctx.rank + 1) * tokens] for x in whole]
    mine = [_strided(x, layout) for x in mine]
    before = [x.clone() for x in mine]
    q, k, v = scatter_heads_gather_tokens(*mine, group=group)
    share, kv_share = heads // ranks, max(1, kv_heads // ranks)
    kv_start = ctx.rank * kv_heads // ranks
    expected = [whole[0][:, :, ctx.rank * share : (ctx.rank + 1) * share]]
    expected += [x[:, :, kv_start : kv_start + kv_share] for x in whole[1:]]
    back = scatter_tokens_gather_heads(q, group=group)
    return {
        "values": all(torch.equal(a, b) for a, b in zip((q, k, v), expected, strict=True)),
        "untouched": all(torch.equal(a, b) for a, b in zip(mine, before, strict=True)),
        "round_trip": torch.equal(back, mine[0]),
        "shapes": [tuple(x.shape) for x in (q, k, v)],
    }


def _strided(x, layout):
    match layout:
        case "contiguous":
            return x.contiguous()
        case "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "every_second":
            wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
            wide[..., ::2] = x
            return wide[..., ::2]
        case _:
            raise AssertionError(layout)


def adjoint(ctx, heads, kv_heads):
    """<A x, y> and <x, A* y> summed over ranks, for the exchange in and the exchange out."""
    group = dist.group.WORLD
    pairs = []
    shapes = [(2, 3, heads, 4), (2, 3, kv_heads, 4), (2, 3, kv_heads, 4)]
    x = [_tensor(*shape, seed=i, stamp=ctx.rank).requires_grad_() for i, shape in enumerate(shapes)]
    out = scatter_heads_gather_tokens(*x, group=group)
    y = [_strided(_tensor(*o.shape, seed=9 + i, stamp=ctx.rank), "heads_first") for i, o in enumerate(out)]
    grads = torch.autograd.grad(out, x, y)
    pairs.append((out, y, x, grads))
    z = _tensor(2, 3 * ctx.world_size, heads // ctx.world_size, 4, seed=20, stamp=ctx.rank).requires_grad_()
    back = scatter_tokens_gather_heads(z, group=group)
    w = _tensor(*back.shape, seed=21, stamp=ctx.rank)
    pairs.append(([back], [w], [z], torch.autograd.grad(back, z, w)))
    return [_inner_products(*pair) for pair in pairs]


def _inner_products(out, y, x, grads):
    both = torch.stack([_dot(out, y), _dot(x, grads)])
    dist.all_reduce(both)
    return both.tolist()


def _dot(left, right):
    return sum((a * b).sum() for a, b in zip(left, right, strict=True)).detach()


def traffic(ctx, sizes, dtype):
    """Calls and bytes of one forward and backward, and of the same without a meter."""
    batch, tokens, heads, kv_heads, dim = sizes
    group = dist.group.WORLD
    q = torch.ones(batch, tokens, heads, dim, dtype=dtype, requires_grad=True)
    k, v = (torch.ones(batch, tokens, kv_heads, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    with CommMeter() as meter:
        inside = scatter_heads_gather_tokens(q, k, v, group=group)
        out = scatter_tokens_gather_heads(inside[0] + inside[1].sum() + inside[2].sum(), group=group)
        forward = meter.calls("exchange")
    out.sum().backward()
    counted = (forward, meter.calls("exchange"), meter.bytes_sent("exchange"))
    scatter_tokens_gather_heads(inside[0].detach(), group=group)
    return counted, meter.calls(), list(meter.traffic)


def refused(ctx, heads, kv_heads):
    """The message of an exchange whose heads do not fit, raised before anything is sent."""
    q = torch.zeros(1, 2, heads, 2)
    k = torch.zeros(1, 2, kv_heads, 2)
    try:
        scatter_heads_gather_tokens(q, k, k, group=dist.group.WORLD)
    except CommError as error:
        return type(error).__name__, str(error)
    return None


def subgroups(ctx):
    """Exchanges confined to {0, 1} and {2, 3}: the ranks whose tokens arrive."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.full((1, 1, 2, 1), float(ctx.rank))
    q, _, _ = scatter_heads_gather_tokens(x, x, x, group=groups[ctx.rank // 2])
    return q.flatten().tolist()


def token_collectives(ctx):
    """gather, split and sum with non-contiguous tensors: value, gradient, inputs untouched."""
    group, ranks, rank = dist.group.WORLD, ctx.world_size, ctx.rank
    whole = _tensor(2, 3 * ranks, 4, seed=1)
    weight = _tensor(4, 2 * 3 * ranks, seed=2).t().reshape(2, 3 * ranks, 4)
    mine = whole[:, 3 * rank : 3 * rank + 3].transpose(0, 2).contiguous().transpose(0, 2)
    result = {}
    for loss in Loss:
        x = mine.clone().requires_grad_()
        gathered = gather_tokens(x, group=group, loss=loss)
        result[f"gather {loss} value"] = torch.equal(gathered, whole)
        (gathered * weight * (rank + 1 if loss is Loss.SHARED else 1)).sum().backward()
        expected = weight[:, 3 * rank : 3 * rank + 3]
        factor = ranks * (ranks + 1) / 2 if loss is Loss.SHARED else 1
        result[f"gather {loss} gradient"] = torch.allclose(x.grad, expected * factor, rtol=1e-14, atol=0)

        full = whole.clone().requires_grad_()
        part = split_tokens(full, group=group, loss=loss)
        result[f"split {loss} value"] = torch.equal(part, mine)
        (part * weight[:, 3 * rank : 3 * rank + 3]).sum().backward()
        total = full.grad.clone()
        if loss is Loss.SHARED:
            dist.all_reduce(total)
        result[f"split {loss} gradient"] = torch.allclose(total, weight, rtol=1e-14, atol=0)

        y = mine.clone().requires_grad_()
        summed = all_reduce_sum(y.transpose(0, 1), group=group, loss=loss)
        grad = _tensor(4, 2, 3, seed=5).permute(2, 1, 0)
        summed.backward(grad)
        copies = ranks if loss is Loss.SHARED else 1
        result[f"sum {loss} gradient"] = torch.allclose(
            y.grad, copies * grad.transpose(0, 1), rtol=1e-14, atol=0
        )
        parts = whole.unflatten(1, (ranks, 3)).sum(1)
        result[f"sum {loss} value"] = torch.allclose(summed, parts.transpose(0, 1), rtol=1e-14, atol=1e-14)
    result["untouched"] = torch.equal(mine, whole[:, 3 * rank : 3 * rank + 3])
    return result
