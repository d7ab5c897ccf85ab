"""Any elementwise function of torch between the projections becomes part of the operator, with torch's derivatives at
its kinks; rows that were rounded stay rounded."""

from __future__ import annotations

import pytest
import torch
from spellings import E
from table import tensors
from torch.nn import functional

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import expressions, rules_rows
from moebius.lowering.experts.rows_written import KERNEL

NAMED = {
    name: getattr(functional, name)
    for name in (
        "elu", "selu", "celu", "leaky_relu", "relu6", "hardswish", "hardtanh", "mish", "softplus", "logsigmoid",
        "softsign", "tanhshrink", "softshrink", "hardshrink", "silu", "gelu", "relu", "sigmoid", "tanh",
    )
}  # fmt: skip
WRITTEN = {
    "steep elu": lambda h: functional.elu(h, 2.5),
    "steeper leaky_relu": lambda h: functional.leaky_relu(h, 1.5),
    "softplus with a threshold": lambda h: functional.softplus(h, 2.0, 1.0),
    "hardtanh between others": lambda h: functional.hardtanh(h, -0.5, 2.0),
    "threshold": lambda h: functional.threshold(h, 0.1, -1.0),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "where of two kinds": lambda h: torch.where(h <= 0.5, h * h, torch.sqrt(h.abs() + 1.0)),
    "xIELU": lambda h: torch.where(h > 0, 0.5 * h * h + 0.3 * h, torch.expm1(h.clamp(max=-1e-6)) - h),
    "sine": lambda h: torch.sin(h) * torch.cos(h),
    "cube": lambda h: h**3,
    "logarithm": lambda h: torch.log(h.square() + 1.0) + torch.log1p(h.abs()),
    "rsqrt": lambda h: h * torch.rsqrt(1.0 + h * h),
}


def layer(activation, gated):
    def function(x, router, gate_up, down):
        weight, index = (x @ router.T).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            gate, up = functional.linear(x[token], gate_up[e]).chunk(2, -1)
            h = activation(gate) * up if gated else activation(gate + 0.0 * 1.0)
            out.index_add_(0, token, functional.linear(h, down[e]) * weight[token, slot, None])
        return out

    return function


def compare(function, dtype=torch.float64, make=tensors, kernel="cpu"):
    """Whether the loop was lowered, to this; the result and every gradient are as in eager."""
    moebius.reset()
    captured = capture(function)
    for seed in range(3):
        results = []
        for run in (captured, function):
            given = [t.detach().to(dtype).requires_grad_() for t in make(seed)]
            out = run(*given)
            out.square().sum().backward()
            results.append([out, *(t.grad for t in given)])
        for ours, plain in zip(*results, strict=True):
            rtol, atol = (1e-9, 1e-10) if dtype is torch.float64 else (1e-4, 1e-4)
            torch.testing.assert_close(ours, plain, rtol=rtol, atol=atol)
    (region,) = report_of(captured_of(captured)).expert_regions
    return region.lowered and region.kernel == kernel


@pytest.mark.share(14)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", [*NAMED, *WRITTEN])
def test_becomes_part_of_the_operator(name, gated):
    activation = {**NAMED, **WRITTEN}[name]
    if gated or name not in ("cube",):
        assert compare(layer(activation, gated))


def at_kinks(seed):
    """Pre-activations that are small multiples of 0.5: x of one column, weights of halves."""
    x, router, gate_up, down = tensors(seed)
    with torch.no_grad():
        x.zero_()
        x[:, 0] = torch.arange(-5, 5) * (seed + 1) * 0.5
        x[:, 1] = 1.0
        gate_up.zero_()
        gate_up[:, :, 0] = 1.0
        gate_up[:, 2:, 1] = 0.5
        router[:, 0].zero_()
    return x, router, gate_up, down


@pytest.mark.share(12)
@pytest.mark.parametrize("name", [*NAMED, *(n for n in WRITTEN if n not in ("where of two kinds", "logarithm"))])
def test_derivatives_at_kinks(name):
    """At 0, at 0.5, at 3 and at 6 the gradient is torch's."""
    assert compare(layer({**NAMED, **WRITTEN}[name], True), make=at_kinks)


def test_another_derivative_is_seen(monkeypatch):
    monkeypatch.setitem(expressions.WRITTEN, "relu6", lambda x: f"clamp({x}, 0.0, 6.0)")
    with pytest.raises(AssertionError):
        compare(layer(functional.relu6, True), make=at_kinks)


@pytest.mark.parametrize("activation", [functional.hardsigmoid, lambda h: functional.celu(h, 0.3)])
def test_derivatives_of_few_digits(activation):
    """torch's derivative in float64 has the digits of float32: there the operator does not say it, and torch itself
    computes it between the projections."""
    assert compare(layer(activation, True), kernel=KERNEL)
    assert compare(layer(activation, True), torch.float32)


def test_where_on_other_rows():
    """A condition that is no comparison of the projections' values."""

    def odd(h):
        return torch.where(torch.arange(h.shape[1]) > 2, h, -h)

    assert not compare(layer(odd, True))


@pytest.mark.parametrize("bounds", [(0.5, -0.5), (float("nan"), 1.0)])
def test_numbers_that_the_language_has_not(bounds):
    def odd(h):
        return functional.softplus(h, -1.0) if bounds[0] == 0.5 else functional.leaky_relu(h, bounds[0])

    function = layer(odd, True)
    captured = capture(function)
    ours, plain = captured(*tensors(0)), function(*tensors(0))
    torch.testing.assert_close(ours, plain, equal_nan=True)


def glu_layer(x, router, gate_up, down):
    weight, index = (x @ router.T).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        h = functional.glu(functional.linear(x[token], gate_up[e]))
        out.index_add_(0, token, functional.linear(h, down[e]) * weight[token, slot, None])
    return out


def test_glu():
    assert compare(glu_layer)


def rounding(places):
    def function(x, router, gate_up, down):
        weight, index = (x @ router.T).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            rows = x[token].float().to(x.dtype) if "rows" in places else x[token]
            w = gate_up[e].float().double() if "weights" in places else gate_up[e]
            gate, up = functional.linear(rows, w).chunk(2, -1)
            y = functional.linear(functional.silu(gate) * up, down[e])
            scale = weight[token, slot, None]
            out.index_add_(0, token, y * (scale.float().double() if "routing" in places else scale))
        return out

    return function


@pytest.mark.parametrize("places", [("rows",), ("weights",), ("routing",), ("rows", "weights", "routing")])
def test_what_was_rounded_stays_rounded(places):
    compare(rounding(places))


def test_rounding_is_seen(monkeypatch):
    """With casts taken for nothing the digits that float32 lacks come back."""
    monkeypatch.setattr(rules_rows, "is_rounded", lambda *_: False)
    with pytest.raises(AssertionError):
        compare(rounding(("rows", "weights", "routing")))
