"""The reference and CPU forms against an independent float64 loop: results and every gradient, over generated
shapes."""
from __future__ import annotations

import pytest
import torch
from allocations import Allocations
from experts_oracle import (
    FUNCTIONS,
    Layer,
    activations,
    make_layer,
    oracle,
    relative_error,
    run,
    worst_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels import ACTIVATIONS, by_expert, cpu, experts, experts_rows, panels
from moebius.kernels.activations import activate, activate_backward, split_gate
from moebius.kernels.contract import Options, Weights
from moebius.kernels.routing import invert, sort_rows

FORMS = ("reference", "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@st.composite
def layers(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Layer:
    """Any routing at all: sentinels on both sides, an expert twice in one token, experts without a token."""
    experts_, top_k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    tokens = draw(st.integers(0, 12))
    ids = st.integers(-2, experts_ + 1) if draw(st.booleans()) else st.integers(0, experts_ - 1)
    index = torch.tensor(
        draw(st.lists(st.lists(ids, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens)),
        dtype=draw(st.sampled_from([torch.int64, torch.int32]))).reshape(tokens, top_k)
    gate = draw(st.sampled_from(["concat", "interleaved", "none"]))
    return make_layer(
        tokens, draw(st.integers(1, 9)), draw(st.integers(1, 9)), experts_, top_k, index=index, dtype=dtype,
        gate=gate, bias=draw(st.booleans()), activation=draw(st.sampled_from(activations(gate))),
        weighted=draw(st.booleans()), weighting=draw(st.sampled_from(["output", "output", "hidden", "input"])),
        seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(layer=layers(), save=st.sampled_from(["default", "recompute"]))
def test_equals_the_loop(form: str, layer: Layer, save: str) -> None:
    assert worst_error(layer, backend=form, save=save) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_precision(form: str, dtype: torch.dtype) -> None:
    for gate in ("concat", "interleaved", "none"):
        layer = make_layer(70, 48, 40, 6, 3, gate=gate, bias=True, dtype=dtype)
        assert worst_error(layer, backend=form) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_float32_routing_weights_with_bfloat16_experts(form: str) -> None:
    layer = make_layer(40, 32, 24, 5, 2, dtype=torch.bfloat16)
    layer.weight = layer.weight.detach().float().requires_grad_()
    out = run(layer, backend=form)
    (grad,) = torch.autograd.grad(out.sum(), [layer.weight])
    assert out.dtype == torch.bfloat16 and grad.dtype == torch.float32
    assert worst_error(layer, backend=form) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("form", FORMS)
def test_every_expert_for_every_token(form: str) -> None:
    assert worst_error(make_layer(6, 5, 4, 4, 4, dtype=torch.float64), backend=form) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_no_token_no_slot_no_expert(form: str) -> None:
    for layer in (make_layer(0, 5, 4, 3, 2), make_layer(4, 5, 4, 3, 0), make_layer(4, 5, 4, 0, 2)):
        layer.index = torch.zeros(layer.weight.shape, dtype=torch.int64)
        out = run(layer, backend=form)
        assert out.shape == layer.x.shape and not out.any()
        for leaf, grad in zip(layer.leaves(), torch.autograd.grad(out.sum(), layer.leaves()), strict=True):
            assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_a_panel(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "PANEL_ROWS", 8)
    for save in ("default", "recompute"):
        assert worst_error(make_layer(50, 6, 5, 3, 2, bias=True, dtype=torch.float64), backend=form, save=save) < 1e-12


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 24))
def test_panels_hold_every_row_once(counts: list[int], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "PANEL_ROWS", size)
        made = list(panels.panels(torch.tensor([0, *counts]).cumsum(0).tolist()))
    rows = [expert for expert, count in enumerate(counts) for _ in range(count)]
    covered, seen, at = [], set(), 0
    for panel in made:
        assert panel.start == at and 0 < panel.stop - panel.start <= size
        at = panel.stop
        for expert, low, high, first in panel.segments:
            assert low < high and first == (expert not in seen)
            seen.add(expert)
            covered += [expert] * (high - low)
    assert covered == rows
    whole = [segment for panel in made for segment in panel.segments]
    assert len(whole) == sum(-(-count // size) for count in counts)  # an expert that fits is never cut


@pytest.mark.parametrize("form", FORMS)
def test_strides(form: str) -> None:
    """Transposed weights, strided tokens, expanded and transposed gradients, column-major routing tables."""
    base = make_layer(11, 6, 4, 3, 2, dtype=torch.float64)
    leaves = dict(
        x=torch.randn(6, 22, dtype=torch.float64).t()[::2], gate_up=torch.randn(3, 6, 8, dtype=torch.float64).mT,
        down=torch.randn(3, 4, 6, dtype=torch.float64).mT, weight=torch.rand(2, 11, dtype=torch.float64).t())
    layer = Layer(index=base.index.t().contiguous().t(),
                  **{name: tensor.requires_grad_() for name, tensor in leaves.items()})
    assert not any(leaf.is_contiguous() for leaf in layer.leaves())
    for grad in (torch.tensor(1.5, dtype=torch.float64).expand(11, 6), torch.randn(6, 11, dtype=torch.float64).t(),
                 torch.randn(6, dtype=torch.float64).expand(11, 6)):
        assert worst_error(layer, grad=grad, backend=form) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_only_the_gradients_asked_for(form: str) -> None:
    layer = make_layer(9, 6, 4, 3, 2, bias=True, dtype=torch.float64)
    names = ("x", "gate_up", "down", "weight", "up_bias", "down_bias")
    everything = dict(zip(names, oracle(layer)[1], strict=True))
    for save in ("default", "recompute"):
        for name in names:
            for other in names:
                getattr(layer, other).requires_grad_(other == name)
            (grad,) = torch.autograd.grad(run(layer, backend=form, save=save).sum(), [getattr(layer, name)])
            assert relative_error(grad, everything[name]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_run_for_run(form: str) -> None:
    def once() -> list[torch.Tensor]:
        layer = make_layer(200, 32, 24, 6, 3, dtype=torch.bfloat16)
        out = run(layer, backend=form)
        return [out, *torch.autograd.grad(out.float().square().sum(), layer.leaves())]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_go_where_the_loop_sends_them(form: str) -> None:
    layer = make_layer(8, 6, 4, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.x[1], layer.weight[2, 0], layer.weight[5, 0] = float("nan"), float("nan"), float("inf")
    layer.index[3] = -1
    with torch.no_grad():
        layer.weight[3] = float("nan")  # of sentinel slots: contributes nothing
    out, want = run(layer, backend=form), oracle(layer)[0]
    assert torch.equal(out.isfinite(), want.isfinite()) and not out[3].any()


@pytest.mark.parametrize("weighting", ["output", "hidden", "input"])
def test_weights_of_sentinel_slots_reach_nothing(weighting: str) -> None:
    layer = make_layer(8, 6, 4, 3, 2, bias=True, weighting=weighting)
    layer.index[3], layer.index[5, 1] = -1, 3
    with torch.no_grad():
        layer.weight[3], layer.weight[5, 1] = float("nan"), float("nan")
    out = run(layer)
    grads = torch.autograd.grad(out.sum(), layer.leaves())
    assert all(t.isfinite().all() for t in (out, *grads)) and not grads[3][3].any()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_derivatives(name: str) -> None:
    """The table's value is the named function, and its backward the derivative (numerically, away from kinks)."""
    entry = ACTIVATIONS[name]
    x = torch.linspace(-4, 4, 40, dtype=torch.float64)  # no zero among them
    assert torch.allclose(entry.value(x), FUNCTIONS[name](x), atol=1e-14)
    step = 1e-6
    numeric = (FUNCTIONS[name](x + step) - FUNCTIONS[name](x - step)) / (2 * step)
    assert torch.allclose(entry.backward(torch.ones_like(x), x), numeric, atol=1e-8)
    grad = torch.randn_like(x)
    assert torch.allclose(entry.backward(grad, x), grad * numeric, atol=1e-7)


@pytest.mark.parametrize("gate", ["concat", "interleaved", "none"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gated_activation_gradcheck(name: str, gate: str) -> None:
    entry = ACTIVATIONS[name]

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return activate(h, entry, gate)

        @staticmethod
        def backward(ctx, grad):
            (h,) = ctx.saved_tensors
            a, grad_h = activate_backward(grad, h, entry, gate)
            assert torch.allclose(a, activate(h, entry, gate))
            return grad_h

    h = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(Gated.apply, (h,))


@pytest.mark.parametrize("form", FORMS)
def test_operator_gradcheck(form: str) -> None:
    layer = make_layer(4, 3, 2, 3, 2, bias=True, dtype=torch.float64)
    def call(x, gate_up, down, weight, up_bias, down_bias):
        return experts(x, gate_up, down, layer.index, weight, gate_up_bias=up_bias, down_bias=down_bias, backend=form)
    assert torch.autograd.gradcheck(call, layer.leaves())


def test_split_gate_views() -> None:
    h = torch.arange(6)
    assert [half.tolist() for half in split_gate(h, "concat")] == [[0, 1, 2], [3, 4, 5]]
    assert [half.tolist() for half in split_gate(h, "interleaved")] == [[0, 2, 4], [1, 3, 5]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(-3, 12), max_size=60))
def test_sorted_rows(num_experts: int, ids: list[int]) -> None:
    order, offsets = sort_rows(torch.tensor(ids, dtype=torch.int64).reshape(-1, 1), num_experts)
    want = [slot for e in range(num_experts) for slot, i in enumerate(ids) if i == e]
    assert order.tolist()[: len(want)] == want and offsets[-1] == len(want)
    assert offsets.diff().tolist() == [ids.count(e) for e in range(num_experts)]
    assert torch.equal(invert(order)[order.long()], torch.arange(len(ids), dtype=torch.int32))


@pytest.mark.parametrize("form", FORMS)
def test_rows_equal_experts_with_one_slot(form: str) -> None:
    layer = make_layer(20, 6, 4, 4, 1, dtype=torch.float64)
    layer.index[3] = 4
    ids, weight = layer.index[:, 0], layer.weight[:, 0]
    out = experts_rows(layer.x, layer.gate_up, layer.down, ids, weight, backend=form)
    exact_out, exact_grads = oracle(layer, torch.ones_like(out))
    assert relative_error(out, exact_out) < 1e-12
    grads = torch.autograd.grad(out.sum(), layer.leaves())
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(grads, exact_grads, strict=True))

    order, offsets = sort_rows(layer.index, 4)
    by_counts = experts_rows(
        layer.x[order.long()], layer.gate_up, layer.down, None, weight[order.long()], counts_E=offsets.diff(),
        backend=form)
    assert relative_error(by_counts, exact_out[order.long()]) < 1e-12  # the sentinel row lies past the counts' sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_form_makes_nothing_of_size_rows_by_model_width(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
                                                            ) -> None:
    monkeypatch.setattr(panels, "PANEL_ROWS", 64)
    monkeypatch.setattr(by_expert, "SMALL", 0)
    tokens, width, narrow, num_experts, top_k = 128, 256, 16, 8, 8
    layer = make_layer(tokens, width, narrow, num_experts, top_k, dtype=dtype)
    order, offsets = sort_rows(layer.index, num_experts)
    weights = Weights(layer.gate_up.detach(), layer.down.detach(), None, None)
    with Allocations() as made:
        out, h = cpu.forward(layer.x.detach(), weights, order, offsets, layer.weight.detach(), top_k, Options())
    rows_by_width = tokens * top_k * width
    assert made.largest < rows_by_width / 4
    assert made.peak < 0.75 * rows_by_width  # H, the result and the sum in float32 among it


