"""The exact executor: dense attention calls on parts of the table, merged by log-sum-exp.

Runs anywhere; on the CPU the calls are torch's fused kernel, so nothing of size queries x keys is ever held.
The whole core is one operator, `evenspan::attend`, whose two outputs are all that a checkpoint policy has
to save.

Legend: B batch, T queries, S keys, H query heads, K key/value heads (K divides H), D head dim.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from evenspan.attention.kernels import accumulation_dtype, backward_with_lse, forward_with_lse
from evenspan.attention.schedule import Call, Ranges, schedule
from evenspan.attention.spans import Span, SpanTable
from evenspan.errors import AttentionError


def attend_segments(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k^T, over the keys that `table` shows) v, exact, as [B, T, H, D] in q's dtype.

    A query that sees no key gets exactly 0 and passes no gradient. fp64 is computed in fp64, everything
    else merges and accumulates in fp32. Any strides; inputs are never written. scale defaults to D ** -0.5.
    Raises AttentionError A201 when shapes do not fit each other or the table.
    """
    check_shapes(q_BTHD, k_BSKD, v_BSKD, table)
    used_scale = 1 / math.sqrt(q_BTHD.shape[-1]) if scale is None else scale
    out, _ = attend(q_BTHD, k_BSKD, v_BSKD, *encode(table), used_scale)
    return out


def check_shapes(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, table: SpanTable) -> None:
    """Raises AttentionError A201 unless q [B, T, H, D], k, v [B, S, K, D] fit the table and K divides H."""
    q, k, v = q_BTHD.shape, k_BSKD.shape, v_BSKD.shape
    fits = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[:3] == v[:3] and q[3] == k[3]
    fits = fits and (q[1], k[1]) == (table.q_tokens, table.k_tokens) and k[2] > 0 and q[2] % k[2] == 0
    same = (q_BTHD.dtype, q_BTHD.device) == (k_BSKD.dtype, k_BSKD.device) == (v_BSKD.dtype, v_BSKD.device)
    if fits and same:
        return
    raise AttentionError(
        "A201",
        f"q {_kind(q_BTHD)}, k {_kind(k_BSKD)}, v {_kind(v_BSKD)} do not fit each other or a table of "
        f"{table.q_tokens} queries x {table.k_tokens} keys",
        hint="pass q [batch, queries, heads, dim] and k, v [batch, keys, kv heads, dim] of one dtype and "
        "device, kv heads dividing heads, and the table of the same tokens",
    )


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} {x.device}"


@lru_cache(maxsize=256)
def encode(table: SpanTable) -> tuple[list[int], int, int]:
    """The table as plain integers: the only form an operator's schema can carry."""
    spans = [n for s in table.spans for n in (s.q_start, s.q_stop, s.k_start, s.k_stop, int(s.causal))]
    return spans, table.q_tokens, table.k_tokens


def _calls(spans: list[int], q_tokens: int, k_tokens: int) -> tuple[Call, ...]:
    return _decoded(tuple(spans), q_tokens, k_tokens)


@lru_cache(maxsize=256)
def _decoded(spans: tuple[int, ...], q_tokens: int, k_tokens: int) -> tuple[Call, ...]:
    rows = zip(*[iter(spans)] * 5, strict=True)
    decoded = tuple(Span(a, b, c, d, bool(causal)) for a, b, c, d, causal in rows)
    return schedule(SpanTable(decoded, q_tokens, k_tokens))


@torch.library.custom_op("evenspan::attend", mutates_args=())
def attend(  # noqa: PLR0917 (an operator's schema is positional)
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    spans: list[int],
    q_tokens: int,
    k_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, T, H] (-inf where a query sees no key)."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    out = q_BTHD.new_zeros((*q_BTHD.shape[:3], v_BSKD.shape[3]), dtype=dtype)
    lse = q_BTHD.new_full(q_BTHD.shape[:3], -math.inf, dtype=dtype)
    for call in _calls(spans, q_tokens, k_tokens):
        part, part_lse = forward_with_lse(
            take(q_BTHD, call.queries),
            take(k_BSKD, call.keys),
            take(v_BSKD, call.keys),
            causal=call.causal,
            scale=scale,
        )
        _merge(out, lse, part.transpose(1, 2), part_lse.transpose(1, 2), call)
    return out.to(q_BTHD.dtype), lse


@attend.register_fake
def _(q_BTHD, k_BSKD, v_BSKD, *others):  # type: ignore[no-untyped-def]  # noqa: ARG001
    out = q_BTHD.new_empty((*q_BTHD.shape[:3], v_BSKD.shape[3]))
    return out, q_BTHD.new_empty(q_BTHD.shape[:3], dtype=accumulation_dtype(q_BTHD.dtype))


@torch.library.custom_op("evenspan::attend_backward", mutates_args=())
def attend_backward(  # noqa: PLR0917
    dout_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BTHD: Tensor,
    lse_BTH: Tensor,
    spans: list[int],
    q_tokens: int,
    k_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each in its own shape and dtype."""
    dtype = accumulation_dtype(q_BTHD.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_BTHD, k_BSKD, v_BSKD))
    for call in _calls(spans, q_tokens, k_tokens):
        parts = backward_with_lse(
            take(dout_BTHD, call.queries),
            q_BHTD=take(q_BTHD, call.queries),
            k_BKTD=take(k_BSKD, call.keys),
            v_BKTD=take(v_BSKD, call.keys),
            out_BHTD=take(out_BTHD, call.queries),
            lse_BHT=take(lse_BTH, call.queries),
            causal=call.causal,
            scale=scale,
        )
        _add(dq, parts[0].transpose(1, 2), call.queries, call.fresh_queries)
        _add(dk, parts[1].transpose(1, 2), call.keys, call.fresh_keys)
        _add(dv, parts[2].transpose(1, 2), call.keys, call.fresh_keys)
    return dq.to(q_BTHD.dtype), dk.to(k_BSKD.dtype), dv.to(v_BSKD.dtype)


@attend_backward.register_fake
def _(dout, q_BTHD, k_BSKD, v_BSKD, *others):  # type: ignore[no-untyped-def]  # noqa: ARG001
    return tuple(x.new_empty(x.shape) for x in (q_BTHD, k_BSKD, v_BSKD))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, spans, q_tokens, k_tokens, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.call = (spans, q_tokens, k_tokens, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    assert dlse is None, "the log-sum-exp is an internal output and has no gradient"
    if dout is None:
        return (None,) * 7
    return (*attend_backward(dout, *ctx.saved_tensors, *ctx.call), None, None, None, None)


attend.register_autograd(_backward, setup_context=_save)


def take(x_BTHx: Tensor, ranges: Ranges) -> Tensor:
    """Tokens of `ranges` with heads first, [B, H, t, ...]: a view for one range with a dense last dim."""
    parts = [x_BTHx[:, start:stop] for start, stop in ranges]
    chosen = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if chosen.dim() == 4 and chosen.stride(-1) != 1:
        chosen = chosen.contiguous()  # the fused kernel reads head vectors as dense rows
    return chosen.transpose(1, 2)


def _add(total_BTHD: Tensor, part_BtHD: Tensor, ranges: Ranges, fresh: tuple[bool, ...]) -> None:
    at = 0
    for (start, stop), first in zip(ranges, fresh, strict=True):
        rows, part = total_BTHD[:, start:stop], part_BtHD[:, at : at + stop - start]
        rows.copy_(part) if first else rows.add_(part)
        at += stop - start


def _merge(out_BTHD: Tensor, lse_BTH: Tensor, part_BtHD: Tensor, part_lse_BtH: Tensor, call: Call) -> None:
    """Adds a call to the running softmax: out <- (e^lse out + e^part_lse part) / (e^lse + e^part_lse)."""
    at = 0
    for (start, stop), first in zip(call.queries, call.fresh_queries, strict=True):
        rows = slice(at, at + stop - start)
        out, lse = out_BTHD[:, start:stop], lse_BTH[:, start:stop]
        part, part_lse = part_BtHD[:, rows], part_lse_BtH[:, rows]
        at += stop - start
        if first:
            out.copy_(part)
            lse.copy_(part_lse)
            continue
        total = torch.logaddexp(lse, part_lse)
        out.mul_(torch.exp(lse - total).unsqueeze(-1))
        out.addcmul_(part.to(out.dtype), torch.exp(part_lse - total).unsqueeze(-1))
        lse.copy_(total)
