"""GEMMs with 8-bit operands: every form against GEMMs of operands rounded by definition, and what budgets choose."""
from __future__ import annotations

import math

import pytest
import torch
from experts_oracle import Layer, make_layer, oracle, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantize import E4M3, block_by_definition
from torch import Tensor
from torch.nn import functional

from moebius.kernels import (
    Budget,
    ExpertsInputError,
    Precision,
    calibrate,
    chosen_precisions,
    experts,
    precision_report,
)
from moebius.kernels.precision import FORMATS, GEMMS, NAMED, OVER_ROWS, parse
from moebius.kernels.quantize import round_blocks

BLOCKS = {"fp8": ((1, 0), (1, 0)), "fp8_block": ((1, 128), (128, 128)), "mxfp8": ((1, 32), (1, 32))}


LEVELS = torch.tensor(E4M3[:127], dtype=torch.float64)  # not negative, in order: even places have an even mantissa


def by_definition(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [R, K] rounded in blocks of (rows, columns): each value to the nearest of E4M3's table, on a tie the even."""
    height, width = x.shape
    rows, columns = block[0], block[1] or max(1, width)
    out = torch.empty(height, width, dtype=torch.float64)
    for top in range(0, height, rows):
        for low in range(0, width, columns):
            part = x[top:top + rows, low:low + columns].to(torch.float32).double()
            largest = float(part.abs().max())
            k = next(k for k in range(-127, 128) if largest <= math.ldexp(448, k))
            scaled = (part.abs() * 2.0 ** -k).contiguous()
            above = torch.searchsorted(LEVELS, scaled).clamp(max=126)
            below = (above - 1).clamp(min=0)
            up, down = LEVELS[above] - scaled, scaled - LEVELS[below]
            place = torch.where(up < down, above, torch.where(down < up, below, above + above % 2 * (below - above)))
            out[top:top + rows, low:low + columns] = LEVELS[place] * 2.0 ** k * part.sign()
    return out


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(1, 0), (1, 3), (2, 2), (3, 4)]), st.integers(1, 5),
       st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_rounded_blocks_equal_the_definition(block: tuple[int, int], height: int, values: list[float]) -> None:
    width = -(-len(values) // height)
    x = functional.pad(torch.tensor(values), (0, height * width - len(values))).view(height, width)
    assert torch.equal(round_blocks(x, *block), by_definition(x, block).float())
    if block == (1, 0):  # the fast definition of this file against the slow one
        want = [block_by_definition(line) for line in x.tolist()]
        assert by_definition(x, block).tolist() == [[v + 0.0 for v in line] for line in want]


def test_what_is_not_finite_stays_in_its_block() -> None:
    x = torch.ones(4, 8, dtype=torch.float64)
    x[1, 2], x[3, 7] = float("nan"), -math.inf
    want = torch.ones(4, 8, dtype=torch.bool)
    want[0:2, 0:4] = want[2:4, 4:8] = False
    assert torch.equal(round_blocks(x, 2, 4).isfinite(), want)


def rounded_layer(layer: Layer, grad: Tensor, chosen: Precision) -> list[Tensor]:
    """The result and the gradients of x, gate_up, down and weight, expert by expert, operands rounded by definition."""

    def rows(x: Tensor, gemm: str) -> Tensor:
        name = getattr(chosen, gemm)
        return x if name is None else by_definition(x, BLOCKS[name][0])

    def matrix(w_NK: Tensor, gemm: str) -> Tensor:
        name = getattr(chosen, gemm)
        return w_NK if name is None else by_definition(w_NK, BLOCKS[name][1])

    x, gate_up, down, weight = (t.detach() for t in (layer.x, layer.gate_up, layer.down, layer.weight))
    out, dx, dweight = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weight)
    d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    for e in range(gate_up.shape[0]):
        # slots in order of their tokens, as a stable sort has them: blocks of a weight gradient depend on it
        token, slot = torch.where(layer.index == e)
        if not len(token):
            continue
        s = weight[token, slot][:, None]
        halves = gate_up[e].chunk(2) if layer.gate == "concat" else (gate_up[e, ::2], gate_up[e, 1::2])
        g, u = (rows(x[token], "up") @ matrix(half, "up").T for half in halves)
        g.requires_grad_(), u.requires_grad_()
        a = functional.silu(g) * u
        out.index_add_(0, token, rows(a.detach(), "down") @ matrix(down[e], "down").T * s)
        da = rows(grad[token], "grad_act") @ matrix(down[e].T, "grad_act").T
        dweight[token, slot] = (da * a.detach()).sum(1)
        dg, du = torch.autograd.grad(a, (g, u), da * s)
        dh = torch.cat([dg, du], 1) if layer.gate == "concat" else torch.stack([dg, du], 2).flatten(1)
        dx.index_add_(0, token, rows(dh, "grad_x") @ matrix(gate_up[e].T, "grad_x").T)
        d_gate_up[e] = rows(dh.T, "grad_gate_up") @ rows(x[token].T, "grad_gate_up").T
        d_down[e] = rows(grad[token].T, "grad_down") @ rows((a.detach() * s).T, "grad_down").T
    return [out, dx, d_gate_up, d_down, dweight]


def same_as_by_definition(layer: Layer, chosen: Precision, **options) -> None:
    grad = torch.randn(layer.x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out = run(layer, precision=chosen, **options)
    got = [out, *torch.autograd.grad(out, layer.leaves(), grad)]
    want = rounded_layer(layer, grad, chosen)
    # float64 throughout: only the order of sums differs, and that in the 16th digit
    assert [relative_error(a, b) for a, b in zip(got, want, strict=True) if relative_error(a, b) > 1e-12] == []


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_equal_their_definition(form: str, name: str) -> None:
    """Widths that are no multiple of a block, an expert with more rows than one, one with none."""
    index = torch.cat([torch.zeros(150, 1), torch.randint(0, 3, (20, 1))]).long()
    layer = make_layer(170, 140, 72, 5, 1, dtype=torch.float64, index=index)
    same_as_by_definition(layer, NAMED[name], backend=form)


@pytest.mark.parametrize("gemm", GEMMS)
def test_each_gemm_alone(gemm: str) -> None:
    """The GEMM that is asked for, and no other; interleaved, K = 2."""
    for name in calibrate.choices(gemm)[1:]:
        layer = make_layer(40, 48, 40, 4, 2, gate="interleaved", dtype=torch.float64)
        chosen = Precision(**{gemm: name})
        same_as_by_definition(layer, chosen)
        assert relative_error(run(layer, precision=chosen), run(layer)) > 1e-3 or gemm not in ("up", "down")


def test_recompute_computes_the_same_h() -> None:
    layer = make_layer(40, 48, 40, 4, 2, dtype=torch.float64)
    same_as_by_definition(layer, NAMED["mxfp8"], save="recompute")


def test_an_expert_of_several_panels() -> None:
    """The CPU form works on 1,024 rows at a time; blocks of a weight gradient are those of the whole expert."""
    layer = make_layer(1500, 8, 4, 2, 1, index=torch.cat([torch.ones(30, 1), torch.zeros(1470, 1)]).long())
    results = []
    for form in ("cpu", "reference"):
        out = run(layer, precision="mxfp8", backend=form)
        results.append([out, *torch.autograd.grad(out.square().sum(), layer.leaves())])
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_how_far_off_they_are(name: str, dtype: torch.dtype) -> None:
    """E4M3's 3 bits of mantissa: an element is off by 2^-4 at most and 2.6% in the mean, a GEMM of two such operands
    by sqrt(2) times that."""
    layer = make_layer(128, 128, 96, 4, 2, dtype=dtype)
    grad = torch.randn(layer.x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = run(layer, precision=name)
    got = [out, *torch.autograd.grad(out, layer.leaves(), grad)]
    want_out, want = oracle(layer, grad)
    errors = [relative_error(a, b) for a, b in zip(got, (want_out, *want), strict=True)]
    assert 0.02 < min(errors) and max(errors) < 0.09, errors
    assert out.dtype == dtype


def test_nan_in_a_weight_and_in_a_token() -> None:
    layer = make_layer(12, 48, 40, 3, 1)
    with torch.no_grad():
        layer.x[3, 1] = float("nan")
        layer.gate_up[2, 0, 0] = float("inf")
    for name in FORMATS:
        out = run(layer, precision=name)
        bad = (layer.index[:, 0] == 2) | (torch.arange(12) == 3)
        assert torch.equal(out.isnan().any(1), bad) and torch.equal(out.isfinite().all(1), ~bad)


def test_operator_under_opcheck_and_tracing() -> None:
    layer = make_layer(17, 12, 8, 5, 2)
    torch.library.opcheck(torch.ops.moebius.experts.default, (
        layer.x, layer.gate_up, layer.down, layer.index, layer.weight, None, None, "silu", "concat", "fp8", "auto",
        "up=mxfp8,grad_down=fp8_block"))


@pytest.mark.parametrize("given, said", [
    ("fp4", "precision='fp4' is not known; None, 'fp8', 'fp8_block', 'mxfp8', a Precision or a Budget"),
    (8, "precision=8 is not known"), ("up=fp4", "precision of up is 'fp4'; one of"), ("down", "is not known"),
    ("sideways=mxfp8", "is not known"), ("budget=tight/1", "is not known"),
    ("grad_down=fp8", "contracts over an expert's rows: use fp8_block"), ("budget=-1/2", "is a positive number"),
])
def test_what_is_not_a_precision(given: object, said: str) -> None:
    layer = make_layer(3, 4, 4, 2, 1)
    with pytest.raises(ExpertsInputError, match=said.replace("(", r"\(")):
        run(layer, precision=given)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), True, "small"])
def test_what_is_not_a_budget(limit: object) -> None:
    with pytest.raises(ExpertsInputError, match="is a positive number"):
        Budget(limit)  # type: ignore[arg-type]


def test_texts_read_back() -> None:
    mixed = Precision(up="mxfp8", grad_down="fp8_block")
    for given_ in (Precision(), *NAMED.values(), mixed, Budget(1e-2, every=7), Budget(1, layer="a 3")):
        assert parse(str(given_)) == given_


# ----------------------------------------------------------------------------------------------------------------------
# Budgets and reports
# ----------------------------------------------------------------------------------------------------------------------


def errors_of(layer: Layer, **options) -> list[float]:
    with precision_report() as report:
        out = run(layer, **options)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype))
    (entry,) = report.layers.values()
    return [entry.errors.total(name) for name in calibrate.QUANTITIES]


def test_budgets_choose_by_measuring() -> None:
    costs = []
    for limit in (1e-4, 1e-2, 4.5e-2, 0.2):
        layer = make_layer(200, 96, 64, 4, 2, dtype=torch.bfloat16, seed=int(limit * 1e5))
        calibrate.CHOSEN.clear()
        errors = errors_of(layer, precision=Budget(limit))
        ((_, chosen),) = chosen_precisions()
        costs.append(calibrate.cost(chosen))
        if chosen:  # where every GEMM is in its own dtype, that is as near as it gets
            assert max(errors) < 1.1 * limit, (limit, str(chosen))  # another gradient than the one it measured with
    assert costs[0] == costs[1] == 9 and 4.5 < costs[2] < 9 and costs[3] == 4.5, costs


def test_the_choice_is_the_cheapest_that_was_measured_to_fit() -> None:
    """Errors that do not add as squares: the plan that looks cheapest fails its own measurement, the next is taken."""
    asked: list[Precision] = []

    def errors(precision: Precision) -> dict[str, float]:
        asked.append(precision)
        count = sum(name is not None for _, name in precision.items())
        return {"result": 1e-3 if count < 2 else 1.0}

    chosen = calibrate.choose(errors, 1e-2)
    assert calibrate.cost(chosen) in (8.0, 9.0) and errors(chosen)["result"] <= 1e-2
    assert calibrate.choose(lambda precision: {"result": 1.0}, 0.5) == Precision()


def test_a_budget_measures_again_after_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate.CHOSEN.clear()
    made: list[int] = []
    real = calibrate.choose
    monkeypatch.setattr(calibrate, "choose", lambda *given: made.append(1) or real(*given))
    layer = make_layer(20, 32, 16, 3, 2)
    with torch.no_grad():
        for _ in range(7):
            run(layer, precision=Budget(0.1, every=3))
    assert len(made) == 3
    monkeypatch.setattr(calibrate, "MOST_CHOSEN", 1)
    run(layer, precision=Budget(0.2))
    assert len(chosen_precisions()) == 1


def test_a_choice_is_its_layers_under_autocast() -> None:
    """autocast copies the weights at each call, to another place."""
    calibrate.CHOSEN.clear()
    layers = [make_layer(20, 32, 16, 3, 2, seed=seed) for seed in (1, 2)]
    held = []
    for _ in range(3):
        for layer in layers:
            with torch.autocast("cpu", torch.bfloat16):
                run(layer, precision=Budget(0.1)).sum().backward()
            held.append(torch.empty(3, 32, 16, dtype=torch.bfloat16))  # takes the place of a freed copy
    assert len(chosen_precisions()) == 2


def test_backward_takes_what_forward_took() -> None:
    calibrate.CHOSEN.clear()
    layer = make_layer(60, 64, 32, 3, 2)
    out = run(layer, precision=Budget(0.2))
    ((_, chosen),) = chosen_precisions()
    grads = torch.autograd.grad(out.sum(), layer.leaves())
    out = run(layer, precision=chosen)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(out.sum(), layer.leaves()), strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 3, 0), (4, 0, 2)])
def test_a_budget_with_nothing_to_measure(shape: tuple[int, int, int]) -> None:
    tokens, number, top_k = shape
    layer = make_layer(tokens, 8, 4, number, top_k, index=torch.zeros(tokens, top_k, dtype=torch.int64))
    out = experts(layer.x, layer.gate_up, layer.down, layer.index, layer.weight, precision=Budget(0.1))
    assert out.shape == layer.x.shape and not out.any()


def test_the_report_names_the_worst_expert() -> None:
    layer = make_layer(80, 64, 32, 4, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.gate_up[2, :, 5] *= 1e4  # one column of outliers: a scale a row leaves the rest of the row too few bits
        layer.x[:, 5] = 1e-4 * layer.x[:, 5]
    with precision_report() as report:
        out = run(layer, precision=Precision(up="fp8"))
        again = run(layer, precision=Precision(up="fp8"))
        out.sum().backward()
    assert torch.equal(out, again)
    (entry,) = report.layers.values()
    assert entry.errors.worst("result")[0] == 2
    assert entry.errors.worst("result")[1] > 2 * entry.errors.total("d down") / 3
    text = str(report)
    assert "up=fp8" in text and "T=80 D=64 N=32 E=4 K=2" in text and "worst expert" in text
    assert all(name in text for name in calibrate.QUANTITIES)


def test_reports_change_nothing_and_end() -> None:
    layer = make_layer(20, 32, 16, 3, 2)
    plain = run(layer)
    with precision_report() as report:
        assert torch.equal(run(layer), plain)
    run(layer)
    (entry,) = report.layers.values()
    assert entry.errors.total("result") < 1e-6 and list(entry.errors.squares) == ["result"]
    assert OVER_ROWS  # the two that "fp8" leaves alone
