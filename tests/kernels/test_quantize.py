"""MXFP8 against the format's definition, written out in float64 and by table, and H kept in it."""
from __future__ import annotations

import math

import pytest
import torch
from experts_oracle import make_layer, oracle, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels import reference
from moebius.kernels.contract import Needs, Options, Weights
from moebius.kernels.quantize import pack, packed_width, unpack
from moebius.kernels.routing import sort_rows

# Every finite value of E4M3 (OCP 8-bit Floating Point v1.0, table 1), from its bits: sign, 4 exponent, 3 mantissa.
E4M3 = [(1 if bits < 128 else -1) * (
    math.ldexp(bits % 8, -9) if (bits >> 3) % 16 == 0 else math.ldexp(8 + bits % 8, (bits >> 3) % 16 - 10))
    for bits in range(256) if bits % 128 != 127]


def nearest(value: float) -> float:
    """The nearest E4M3 value, on a tie the one with an even mantissa: a slow and independent rounding."""
    best = min(abs(value - v) for v in E4M3)
    tied = {v for v in E4M3 if abs(value - v) == best}
    if len(tied) == 1:
        return tied.pop()
    bits = {v: i for i, v in enumerate(v for v in E4M3[:127])}
    return math.copysign(next(v for v in map(abs, tied) if bits[v] % 2 == 0), value)


def block_by_definition(values: list[float]) -> list[float]:
    largest = max(map(abs, values))
    if not math.isfinite(largest):
        return [float("nan")] * len(values)
    k = next(k for k in range(-127, 128) if largest <= math.ldexp(448, k))
    return [math.ldexp(nearest(math.ldexp(v, -k)), k) for v in values]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
def test_equals_the_definition(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    packed = pack(x)
    assert packed.dtype == torch.uint8 and packed.shape == (1, packed_width(len(values)))
    want = [v for low in range(0, len(values), 32) for v in block_by_definition(values[low:low + 32])]
    got = unpack(packed, len(values), torch.float32)[0].tolist()
    # a value below float32's normal range may be flushed or rounded there: as float32 itself says
    assert got == torch.tensor(want, dtype=torch.float64).float().tolist()


def test_scales_round_up() -> None:
    for largest, k in ((448.0, 0), (448.0001, 1), (449.0, 1), (896.0, 1), (224.0, -1), (1.0, -8), (0.0, -127)):
        assert pack(torch.tensor([[largest]]))[0, 1] == k + 127, largest


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_block(bad: float) -> None:
    x = torch.ones(2, 70)
    x[0, 40] = bad
    back = unpack(pack(x), 70, torch.float32)
    want = torch.ones(2, 70)
    want[0, 32:64] = float("nan")
    assert torch.equal(back.isnan(), want.isnan()) and torch.equal(back.nan_to_num(2), want.nan_to_num(2))


@pytest.mark.parametrize("width", [5, 32, 40])
def test_unpacked_rows_lie_side_by_side(width: int) -> None:
    """The kernels read H by its width."""
    for dtype in (torch.float32, torch.float16):
        assert unpack(pack(torch.randn(3, width)), width, dtype).is_contiguous()


def test_no_rows_and_no_columns() -> None:
    assert pack(torch.empty(0, 5)).shape == (0, 6) and unpack(pack(torch.empty(0, 5)), 5, torch.float32).shape == (0, 5)
    assert pack(torch.empty(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("form", ["reference", "cpu"])
@pytest.mark.parametrize("gate", ["concat", "interleaved", "none"])
def test_h_in_fp8(form: str, gate: str) -> None:
    """The result is unchanged, bit for bit; gradients are those of backward from the rounded H, a few per cent off."""
    layer = make_layer(60, 48, 40, 5, 2, gate=gate, bias=True, dtype=torch.float64)
    layer.index[3] = -1
    out = run(layer, backend=form, save="fp8")
    assert torch.equal(out, run(layer, backend=form))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = torch.autograd.grad(out, layer.leaves(), grad)
    weights = Weights(*(t.detach() for t in (layer.gate_up, layer.down, layer.up_bias, layer.down_bias)))
    order, offsets = sort_rows(layer.index, 5)
    arguments = (weights, order, offsets, layer.weight.detach(), 2, Options(gate=gate))
    _, h = reference.forward(layer.x.detach(), *arguments)
    rounded = unpack(pack(h), h.shape[1], h.dtype)
    want = reference.backward(grad, layer.x.detach(), rounded, *arguments, Needs(*[True] * 6))
    by_leaf = (want.x_TD, want.gate_up_E2ND, want.down_EDN, want.weight_TK, want.gate_up_bias_EM, want.down_bias_ED)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, by_leaf, strict=True))
    errors = [relative_error(a, b) for a, b in zip(got, oracle(layer, grad)[1], strict=True)]
    assert 1e-3 < max(errors) < 0.05 and errors[-1] < 1e-12  # down_bias' gradient does not depend on H
