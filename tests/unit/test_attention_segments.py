"""The exact executor against dense attention: outputs and every gradient, all dtypes and layouts; mutants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenspan.attention import kernels, patterns, segments
from evenspan.attention.dense import attend_dense
from evenspan.attention.segments import attend_segments
from evenspan.attention.spans import Span, SpanTable
from evenspan.errors import AttentionError

TABLES = {
    "teacher forcing": patterns.teacher_forcing([(0, 8)], frame_per_block=4).scaled(3),
    "teacher forcing, 3 ranks, padded": patterns.teacher_forcing(
        [(0, 3), (3, 6), (6, 9)], frame_per_block=4, valid_frames=8
    ).scaled(2),
    "teacher forcing, window and sink": patterns.teacher_forcing(
        [(0, 5), (5, 10)], frame_per_block=2, window=3, sink=1
    ),
    "block causal": patterns.block_causal(7, frame_per_block=3).scaled(2),
    "causal": patterns.causal(13),
    "causal, window and sink": patterns.causal(13, window=4, sink=2),
    "documents": patterns.documents([5, 0, 1, 8]),
    "full, more keys": patterns.full(5, 11),
    "wide causal": SpanTable((Span(1, 4, 2, 9, True),), 6, 10),
    "tall causal": SpanTable((Span(1, 8, 2, 5, True),), 9, 6),
    "two diagonals": SpanTable((Span(0, 5, 0, 9, True), Span(2, 9, 9, 12, True), Span(5, 9, 3, 9)), 10, 13),
    "nothing": SpanTable((), 4, 5),
}


def draw(table: SpanTable, *, dtype=torch.float64, batch=2, heads=4, kv_heads=4, dim=8, seed=0):
    """q, k, v that need gradients, and an output gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, count: int) -> Tensor:
        return torch.randn(batch, tokens, count, dim, dtype=torch.float64, generator=generator).to(dtype)

    inputs = [
        normal(table.q_tokens, heads),
        normal(table.k_tokens, kv_heads),
        normal(table.k_tokens, kv_heads),
    ]
    return [x.requires_grad_() for x in inputs], normal(table.q_tokens, heads)


def results(attend, inputs: list[Tensor], dout: Tensor, table: SpanTable, **options) -> dict[str, Tensor]:
    """The output and the gradients by name."""
    out = attend(*inputs, table, **options)
    grads = torch.autograd.grad(out, inputs, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float) -> None:
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_dense_attention_in_fp64(name: str, kv_heads: int) -> None:
    table = TABLES[name]
    inputs, dout = draw(table, kv_heads=kv_heads)
    got, expected = (results(f, inputs, dout, table) for f in (attend_segments, attend_dense))
    assert_same(got, expected, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "atol"),
    [
        (torch.float32, 5e-6),
        (
            torch.bfloat16,
            0.06,
        ),  # inputs of a few units: two roundings of 2^-8 relative, sums of about ten terms
    ],
)
@pytest.mark.parametrize("name", TABLES)
def test_lower_precision(name: str, dtype: torch.dtype, atol: float) -> None:
    table = TABLES[name]
    inputs, dout = draw(table, dtype=dtype, kv_heads=2)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(attend_dense, exact, dout.double(), table)
    got = results(attend_segments, inputs, dout, table)
    assert_same(got, {n: x.to(dtype) for n, x in expected.items()}, atol=atol)


def test_longer_than_a_kernel_tile() -> None:
    table = patterns.teacher_forcing([(0, 4), (4, 8)], frame_per_block=2).scaled(150)
    inputs, dout = draw(table, batch=1, heads=2, kv_heads=1, dim=16)
    got, expected = (results(f, inputs, dout, table) for f in (attend_segments, attend_dense))
    assert_same(got, expected, atol=1e-12)


def test_scale_is_used() -> None:
    table = TABLES["causal"]
    inputs, dout = draw(table)
    got, expected = (results(f, inputs, dout, table, scale=0.3) for f in (attend_segments, attend_dense))
    assert_same(got, expected, atol=1e-13)


def test_rows_without_keys_are_exactly_zero() -> None:
    table = TABLES["teacher forcing, 3 ranks, padded"]
    inputs, dout = draw(table)
    padding = [28 + 0, 29, 34, 35]  # frame 8: clean unit 14, noisy unit 17, two tokens each
    got = results(attend_segments, inputs, dout, table)
    for value in got.values():
        assert torch.count_nonzero(value[:, padding]) == 0
        assert torch.count_nonzero(value) > 0


def test_padding_may_hold_anything() -> None:
    table = TABLES["teacher forcing, 3 ranks, padded"]
    inputs, dout = draw(table)
    expected = results(attend_segments, inputs, dout, table)
    dirty = [x.detach().clone() for x in inputs]
    for x in (*dirty, dout):
        x[:, [28, 29, 34, 35]] = float("nan")
    got = results(attend_segments, [x.requires_grad_() for x in dirty], dout, table)
    assert_same(got, expected, atol=0)


def test_any_strides() -> None:
    table = TABLES["teacher forcing, 3 ranks, padded"]
    inputs, dout = draw(table)
    expected = results(attend_segments, inputs, dout, table)

    def relaid(x: Tensor, *order: int) -> Tensor:
        back = [order.index(i) for i in range(4)]
        return x.detach().permute(order).contiguous().permute(back)

    orders = [(0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 1, 0)]
    *strided, strided_dout = [relaid(x, *order) for x, order in zip((*inputs, dout), orders, strict=True)]
    got = results(attend_segments, [x.requires_grad_() for x in strided], strided_dout, table)
    assert_same(got, expected, atol=1e-14)
    packed = torch.cat([x.detach() for x in inputs], dim=-1).requires_grad_()
    out = attend_segments(*packed.chunk(3, dim=-1), table)
    (dpacked,) = torch.autograd.grad(out, packed, dout)
    torch.testing.assert_close(dpacked, torch.cat([expected[n] for n in ("dq", "dk", "dv")], -1))


def test_an_expanded_gradient_and_untouched_inputs() -> None:
    table = TABLES["teacher forcing"]
    inputs, _ = draw(table)
    before = [x.detach().clone() for x in inputs]
    attend_segments(*inputs, table).sum().backward()
    expected = results(attend_dense, inputs, torch.ones_like(inputs[0]), table)
    assert_same(
        {n: x.grad for n, x in zip(("dq", "dk", "dv"), inputs, strict=True)},
        {n: expected[n] for n in ("dq", "dk", "dv")},
        atol=1e-13,
    )
    assert all(torch.equal(x.detach(), y) for x, y in zip(inputs, before, strict=True))


def test_one_full_span_is_the_kernel_itself() -> None:
    table = patterns.full(33)
    inputs, _ = draw(table)
    heads_first = [x.transpose(1, 2) for x in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    assert torch.equal(attend_segments(*inputs, table), expected)


def test_only_some_inputs_need_gradients() -> None:
    table = TABLES["causal"]
    inputs, dout = draw(table)
    expected = results(attend_segments, inputs, dout, table)
    out = attend_segments(inputs[0].detach(), inputs[1].detach(), inputs[2], table)
    torch.testing.assert_close(torch.autograd.grad(out, inputs[2], dout)[0], expected["dv"])


def test_gradcheck() -> None:
    table = TABLES["teacher forcing, window and sink"]
    inputs, _ = draw(table, batch=1, heads=2, kv_heads=1, dim=2)
    assert torch.autograd.gradcheck(lambda *x: attend_segments(*x, table), inputs)


def test_operator_contract() -> None:
    table = TABLES["teacher forcing, window and sink"]
    inputs, _ = draw(table, kv_heads=2)
    out, lse = segments.attend(*inputs, *segments.encode(table), 0.5)
    assert out.shape == inputs[0].shape
    assert lse.shape == inputs[0].shape[:3]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(segments.attend, (*inputs, *segments.encode(table), 0.5), test_utils=tests)


@pytest.mark.parametrize("name", TABLES)
def test_plain_math_where_the_kernel_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES[name]
    inputs, dout = draw(table, kv_heads=2)
    expected = results(attend_dense, inputs, dout, table)
    monkeypatch.setattr(kernels, "fused_ops", lambda: None)
    assert not kernels.uses_fused(inputs[0], inputs[2])
    assert_same(results(attend_segments, inputs, dout, table), expected, atol=1e-13)


def test_values_of_another_width_take_plain_math() -> None:
    table = TABLES["teacher forcing"]
    (q, k, _), _ = draw(table)
    v = torch.randn(2, table.k_tokens, 4, 5, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(2, table.q_tokens, 4, 5, dtype=torch.float64)
    got, expected = (results(f, [q, k, v], dout, table) for f in (attend_segments, attend_dense))
    assert_same(got, expected, atol=1e-13)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)),
        ((1, 5, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)),
        ((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)),
        ((1, 4, 2, 8), (1, 4, 2, 4), (1, 4, 2, 8)),
        ((1, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)),
        ((4, 2, 8), (4, 2, 8), (4, 2, 8)),
    ],
)
def test_shapes_that_do_not_fit(shapes) -> None:
    with pytest.raises(AttentionError, match="A201") as caught:
        attend_segments(*(torch.zeros(shape) for shape in shapes), patterns.full(4))
    assert "4 queries x 4 keys" in caught.value.fact


def test_dtypes_that_do_not_fit() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(AttentionError, match="A201"):
        attend_segments(q, q, q.double(), patterns.full(4))


def parity(table: SpanTable) -> None:
    inputs, dout = draw(table, kv_heads=2)
    got, expected = (results(f, inputs, dout, table) for f in (attend_segments, attend_dense))
    assert_same(got, expected, atol=1e-12)


def test_mutant_detached_values_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = segments.backward_with_lse

    def detached(*args, **kwargs):
        dq, dk, dv = real(*args, **kwargs)
        return dq, dk, torch.zeros_like(dv)

    table = TABLES["teacher forcing"]
    parity(table)
    monkeypatch.setattr(segments, "backward_with_lse", detached)
    with pytest.raises(AssertionError, match="dv"):
        parity(table)


def test_mutant_local_softmax_in_the_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = segments.backward_with_lse

    def local(dout, *, q_BHTD, k_BKTD, v_BKTD, out_BHTD, lse_BHT, causal, scale):
        options = {"causal": causal, "scale": scale}
        out_BHTD, lse_BHT = kernels.forward_with_lse(q_BHTD, k_BKTD, v_BKTD, **options)
        tensors = {"q_BHTD": q_BHTD, "k_BKTD": k_BKTD, "v_BKTD": v_BKTD}
        return real(dout, **tensors, out_BHTD=out_BHTD, lse_BHT=lse_BHT, **options)

    monkeypatch.setattr(segments, "backward_with_lse", local)
    with pytest.raises(AssertionError, match="dq"):
        parity(TABLES["teacher forcing"])


def test_mutant_off_by_one_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = patterns._past
    monkeypatch.setattr(patterns, "_past", lambda start, window, sink: real(max(0, start - 1), window, sink))
    shifted = patterns.teacher_forcing([(0, 8)], frame_per_block=4).scaled(3)
    inputs, dout = draw(shifted)
    got = results(attend_segments, inputs, dout, shifted)
    expected = results(attend_dense, inputs, dout, TABLES["teacher forcing"])
    with pytest.raises(AssertionError, match="out"):
        assert_same(got, expected, atol=1e-12)
