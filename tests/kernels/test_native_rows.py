"""The CPU form's row work in C: equal to float64 and to torch's operators for all threads, widths and values."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from experts_oracle import make_layer, run, worst_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moebius.kernels import products
from moebius.kernels.activations import ACTIVATIONS, GATES, activate, activate_backward, find_activation
from moebius.kernels.native import panel_work
from moebius.kernels.panels import Panel, Segment
from moebius.kernels.routing import sort_rows

NAMES = sorted(panel_work.ACTIVATIONS)
DTYPES = list(panel_work.DTYPES)
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 88.6, -88.6, 120.0, -120.0, 3e38, -3e38]
# One rounding to bfloat16 is half a unit of 2**-8, to float16 of 2**-11. In float32, exp amplifies its argument's
# rounding by the argument, which for gelu_tanh is up to about 12 where the slope is not yet flat.
TOLERANCE = {torch.float32: 12 * 5 * 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def test_it_is_built_and_found_torchs_threads_and_products() -> None:
    """Everything else here would pass in torch's operators too."""
    assert panel_work.rows is not None, "python setup.py build_ext --inplace"
    assert panel_work.rows.POOL and panel_work.rows.PRODUCTS


@settings(max_examples=60, deadline=None)
@given(num_experts=st.integers(0, 9), dtype=st.sampled_from([torch.int64, torch.int32]),
       ids=st.lists(st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, -(2**31)])), max_size=60))
def test_rows_are_sorted_as_torch_sorts_them(num_experts: int, dtype: torch.dtype, ids: list[int]) -> None:
    index = torch.tensor(ids, dtype=dtype)
    found = panel_work.sort_rows(index, num_experts)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panel_work, "rows", None)
        want = sort_rows(index.reshape(-1, 1), num_experts)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("index", [torch.tensor([[2**40, 1]]), torch.tensor([[2, 1], [0, 1]], dtype=torch.uint8),
                                   torch.tensor([[3, 1], [0, 2]]).T, torch._neg_view(-torch.tensor([[1, 0, 1]]))])
def test_other_ids_are_sorted_too(index: Tensor) -> None:
    order, offsets = sort_rows(index, 3)
    flat = index.reshape(-1).tolist()
    want = [slot for expert in range(3) for slot, there in enumerate(flat) if there == expert]
    assert order.tolist()[: len(want)] == want and offsets.diff().tolist() == [flat.count(e) for e in range(3)]


def forward(h: Tensor, scale: Tensor | None, name: str, gate: str) -> Tensor:
    out = h.new_empty(h.shape[0], h.shape[1] // (1 if gate == "none" else 2))
    assert panel_work.gated(out, h, scale, ACTIVATIONS[name], gate)
    return out


def backward(grad_a: Tensor, h: Tensor, scale: Tensor | None, name: str, gate: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dH, A times its weight, <dA, A>)."""
    grad_h, a, dot = torch.empty_like(h), torch.empty_like(grad_a), torch.empty(h.shape[0])
    assert panel_work.gated_backward(grad_h, a, dot, grad_a, h, scale, ACTIVATIONS[name], gate)
    return grad_h, a, dot


def assert_close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert not error.numel() or error.max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(gate=st.sampled_from(GATES), dtype=st.sampled_from(DTYPES), count=st.integers(0, 5),
       width=st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 515])), weighted=st.booleans(),
       seed=st.integers(0, 999))
def test_equals_float64(name: str, gate: str, dtype: torch.dtype, count: int, width: int, weighted: bool, seed: int
                        ) -> None:
    torch.manual_seed(seed)
    h = (3 * torch.randn(count, width * (1 if gate == "none" else 2))).to(dtype)
    grad_a = torch.randn(count, width).to(dtype)
    scale = torch.rand(count) if weighted else None
    factor = torch.ones(count, 1, dtype=torch.float64) if scale is None else scale.double()[:, None]
    a_exact, grad_h_exact = activate_backward(grad_a.double() * factor, h.double(), ACTIVATIONS[name], gate)
    assert_close(forward(h, scale, name, gate), a_exact * factor, dtype)
    grad_h, a, dot = backward(grad_a, h, scale, name, gate)
    assert_close(grad_h, grad_h_exact, dtype)
    assert_close(a, a_exact * factor, dtype)
    size = (grad_a.double() * a_exact).abs().sum(1).clamp(min=1.0)  # a sum's error goes with its terms
    assert not count or ((dot.double() - (grad_a.double() * a_exact).sum(1)).abs() / size).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Zeros with their sign, infinities and NaN: what torch's operators give, forward and backward. (Of one number: of
    many, its gelu makes NaN of infinity.)"""
    h = torch.tensor([SPECIAL], dtype=dtype)
    one = torch.ones_like(h)
    singly = [activate_backward(one[:, :1].float(), x.float()[:, None], ACTIVATIONS[name], "none") for x in h.unbind(1)]
    expected, slope = (torch.cat(each, 1) for each in zip(*singly, strict=True))
    grad_h, a, _ = backward(one, h, None, name, "none")
    for ours, torchs in ((forward(h, None, name, "none"), expected), (a, expected), (grad_h, slope)):
        torch.testing.assert_close(ours.float(), torchs.to(dtype).float(), rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("gate", ["concat", "interleaved"])
def test_special_values_stay_in_their_half_and_row(gate: str) -> None:
    h = torch.randn(3, 2 * len(SPECIAL))
    clean = forward(h, None, "silu", gate)
    h[1, 0] = float("nan")
    ours = forward(h, None, "silu", gate)
    assert ours[1, 0].isnan()
    ours[1, 0] = clean[1, 0]
    assert torch.equal(ours, clean)


def test_exponential_is_within_two_units_in_the_last_place() -> None:
    """Through the sigmoid, where that is exp(x) to 24 bits, down to where exp is no normal float any more."""
    x = torch.linspace(-86, -18, 200_001)
    exact = torch.sigmoid(x.double())
    error = (forward(x[None], None, "sigmoid", "none")[0].double() - exact).abs() / exact
    assert error.max() < 3 * 2.0**-24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Every number of 16 bits, as it is and times factors that leave ties, subnormal numbers and infinities."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[None]
    for factor in (1.0, 1 / 3, 0.5, 1.5, 2.0**-9, 2.0**9, 1 + 2.0**-11, 1 + 2.0**-8):
        ours = forward(x, torch.tensor([factor]), "identity", "none")
        exact = (x.float() * factor).to(dtype)
        assert torch.equal(ours.isnan(), exact.isnan())
        assert torch.equal(ours.nan_to_num(0).view(torch.int16), exact.nan_to_num(0).view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_row_order(dtype: torch.dtype) -> None:
    token = torch.randint(0, 5, (300,), dtype=torch.int32)
    panel = torch.randn(300, 130).to(dtype)
    ours, expected = torch.ones(5, 130), torch.ones(5, 130)
    assert panel_work.add(ours, token, panel)
    for row in range(300):
        expected[token[row]] += panel[row].float()
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_token_that_is_not_there_is_refused(wrong: int) -> None:
    total = torch.zeros(5, 8)
    with pytest.raises(IndexError, match=f"of token {wrong}; there are 5 tokens"):
        panel_work.add(total, torch.tensor([0, wrong], dtype=torch.int32), torch.ones(2, 8))
    assert not total.any()


def test_what_c_does_not_know_is_left_to_torch() -> None:
    h = torch.randn(4, 8)
    out = torch.full((4, 4), 7.0)
    assert not panel_work.gated(out, h, None, find_activation("tanh(g) * u", "concat"), "concat")
    assert not panel_work.gated(out.double(), h.double(), None, ACTIVATIONS["silu"], "concat")
    assert not panel_work.gated(out, torch.randn(8, 4).T, None, ACTIVATIONS["silu"], "concat")
    assert not panel_work.add(out.double(), torch.zeros(4, dtype=torch.int32), out)
    assert not panel_work.add(out, torch.zeros(4, dtype=torch.int64), out)
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """A layer large enough for its rows to be shared out."""
    layer = make_layer(600, 96, 128, 4, 2, dtype=dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            h = layer.gate_up.detach().reshape(-1, 96).contiguous()
            h = h[: 256 * (h.shape[0] // 256)].reshape(-1, 256).repeat(8, 1)
            found.append((forward(h, None, "silu", "concat"),
                          *backward(h[:, :128].contiguous(), h, None, "silu", "concat")))
            total = torch.zeros(600, 256)
            panel_work.add(total, torch.arange(h.shape[0], dtype=torch.int32) % 600, h)
            found[-1] += (total,)
    finally:
        torch.set_num_threads(before)
    assert h.numel() > 4 * 32768  # the grain in rows.c
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_form_without_it(dtype: torch.dtype, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that was not built computes the same, and the built one does not take that path."""
    calls = []
    monkeypatch.setattr("moebius.kernels.gating.activate", lambda *given: calls.append(1) or activate(*given))
    monkeypatch.setattr("moebius.kernels.by_expert.SMALL", 0)
    layer = make_layer(70, 48, 40, 6, 3, gate=gate, bias=True, dtype=dtype)
    built = run(layer, backend="cpu").detach()
    assert bool(calls) == (dtype is torch.float64)
    monkeypatch.setattr(panel_work, "rows", None)
    limits = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
    assert worst_error(layer, backend="cpu") < limits[dtype]
    assert calls
    torch.testing.assert_close(run(layer, backend="cpu").detach(), built)


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_ours() -> Iterator[None]:
    assert panel_work.rows is not None
    before = panel_work.rows.use_gemm(False)
    yield
    panel_work.rows.use_gemm(before)


@pytest.mark.parametrize("dtype", panel_work.MULTIPLIED)
def test_products_are_torchs_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, without_ours: None) -> None:
    """Where they are not ours (test_gemm.py). The same bits with C's loop over the experts as with Python's, which C's
    leaves alone; experts of several panels, of one row and of none among them."""
    monkeypatch.setattr("moebius.kernels.panels.PANEL_ROWS", 64)
    monkeypatch.setattr("moebius.kernels.by_expert.SMALL", 0)
    index = torch.randint(0, 5, (200, 2)).clamp(min=1)
    index[:150, 0], index[7, 1] = 6, 0
    layer = make_layer(200, 24, 16, 8, 2, gate="concat", bias=True, dtype=dtype, index=index)

    def results() -> list[torch.Tensor]:
        out = run(layer, backend="cpu")
        return [out, *torch.autograd.grad(out.float().square().sum(), layer.leaves())]

    calls, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **named: calls.append(1) or mm(*given, **named))
    in_c = results()
    assert not calls
    monkeypatch.setattr(panel_work, "multiplies", lambda: False)
    in_python = results()
    assert calls
    assert all(torch.equal(a, b) for a, b in zip(in_c, in_python, strict=True))


def test_what_no_table_of_addresses_says_is_left_to_python() -> None:
    assert products.Matrices(slice(None), [torch.ones(4, 3), torch.ones(4, 3)]).table is not None
    assert products.Matrices(slice(None), [torch.ones(4, 3), torch.ones(3, 4).T]).table is None
    assert products.Matrices(slice(None), torch.ones(2, 4, 3, dtype=torch.complex64)).table is None
    negated = torch.ones(2, 4, 3, dtype=torch.complex64).conj().imag
    assert negated.is_neg() and products.Matrices(slice(None), negated).table is None
    assert products.Matrices(slice(None), [negated[0], negated[1]]).table is None


def test_a_product_that_torch_refuses_is_an_error() -> None:
    panel = Panel(0, 2, [Segment(0, 0, 2, True)])
    weight = products.Matrices(slice(None), torch.ones(1, 5, 3))
    rows, out = torch.ones(2, 4), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"refused.*\[2, 4\] @ \[5, 3\] -> \[2, 3\]"):
        panel_work.products(products.along(out, 0), products.along(rows, 0), weight.operand(), panel, torch.float32,
                            panel_work.NEVER, 0)
