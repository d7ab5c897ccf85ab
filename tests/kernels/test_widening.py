"""16 bits multiplied in float32 where the library has nothing fast for them: that all forms do it, and lose nothing."""
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from experts_oracle import Layer, make_layer, oracle, relative_error, run
from torch.utils._python_dispatch import TorchDispatchMode

from moebius.kernels import by_expert, panels, products, widening
from moebius.kernels.native import panel_work
from moebius.kernels.panels import Panel, Segment
from moebius.kernels.projection import project
from moebius.kernels.separate_weights import Block, experts_apart
from moebius.kernels.widening import NEVER

HALVES = [torch.bfloat16, torch.float16]
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "linear"}


class Products(TorchDispatchMode):
    """Counts products by dtype: those that C makes, and torch's own where no operator hides them."""

    def __enter__(self) -> Products:
        self.made = Counter[torch.dtype]()
        self.before = panel_work.rows.products_made()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        now = panel_work.rows.products_made()
        for dtype, before, after in zip(panel_work.MULTIPLIED, self.before, now, strict=True):
            self.made[dtype] += after - before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.made[args[-1].dtype] += 1
        return func(*args, **kwargs or {})


def balanced(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.stack([(torch.arange(tokens) + slot) % experts for slot in range(top_k)], 1)


Call = Callable[[], list[torch.Tensor]]


def operator(dtype: torch.dtype, tokens: int = 40, **options: Any) -> tuple[Call, Layer]:
    calling = {name: options.pop(name) for name in ("precision", "save") if name in options}
    layer = make_layer(tokens, 24, 16, 5, 2, dtype=dtype, index=balanced(tokens, 5, 2), **options)
    return lambda: with_gradients(run(layer, backend="cpu", **calling), layer.leaves()), layer


def apart(dtype: torch.dtype, tokens: int = 40) -> tuple[Call, Layer]:
    """A parameter for each expert, gate and up apart, some turned."""
    layer = make_layer(tokens, 24, 16, 5, 2, dtype=dtype, index=balanced(tokens, 5, 2))

    def call() -> list[torch.Tensor]:
        gate_up = [Block(True, tuple(layer.gate_up[:, rows].mT)) for rows in (slice(0, 16), slice(16, 32))]
        out = experts_apart(layer.x, gate_up, [Block(False, tuple(layer.down))], layer.index, layer.weight, "silu")
        return with_gradients(out, layer.leaves())

    return call, layer


def with_gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


FORMS: dict[str, Callable[[torch.dtype], tuple[Call, Layer]]] = {
    "panels": operator,
    "panels, biases": lambda dtype: operator(dtype, bias=True),
    "panels, interleaved, H computed again": lambda dtype: operator(dtype, gate="interleaved", save="recompute"),
    "panels, an activation of torch's": lambda dtype: operator(dtype, activation="gelu"),
    "panels, biases of hidden weights": lambda dtype: operator(dtype, bias=True, weighting="hidden"),
    "by expert": lambda dtype: operator(dtype, tokens=600),
    "by expert, H computed again": lambda dtype: operator(dtype, tokens=600, save="recompute"),
    "apart, panels": apart,
    "apart, by expert": lambda dtype: apart(dtype, tokens=600),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says how slow the library is in 16 bits."""
    monkeypatch.setattr(by_expert, "SMALL", 0)
    return lambda slowness: monkeypatch.setattr(
        widening, "slowness", lambda dtype: slowness if dtype in HALVES else 1.0)


def assert_wide(call: Call, exact: list[torch.Tensor], dtype: torch.dtype, slow: Callable[[float], None]) -> None:
    """Every product is in float32 where the library is slow, in the dtype where it is not; errors are no larger."""
    errors = {}
    for slowness in (1.0, 30.0):
        slow(slowness)
        with Products() as products:
            found = call()
        assert bool(products.made[dtype]) == (slowness == 1.0), products.made
        assert slowness == 1.0 or products.made[torch.float32]
        errors[slowness] = [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
    assert all(wide <= 1.1 * narrow for wide, narrow in zip(errors[30.0], errors[1.0], strict=True)), errors


@pytest.mark.share(14)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form(form: str, dtype: torch.dtype, threads: int, slow: Callable[[float], None]) -> None:
    call, layer = FORMS[form](dtype)
    out, grads = oracle(layer, torch.ones(layer.x.shape))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_wide(call, [out, *grads], dtype, slow)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_that_c_leaves_to_python(dtype: torch.dtype, slow: Callable[[float], None],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_work, "multiplies", lambda: False)
    monkeypatch.setattr(panels, "PANEL_ROWS", 6)  # sums over panels too
    call, layer = apart(dtype)
    out, grads = oracle(layer, torch.ones(layer.x.shape))
    assert_wide(call, [out, *grads], dtype, slow)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_projections(dtype: torch.dtype, turned: bool, slow: Callable[[float], None]) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor([0, 9, 9, 14, 40])
    rows, weight, bias = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((40, 24), (4, 16, 24), (4, 16)))
    given = weight.detach().mT.contiguous().requires_grad_() if turned else weight

    def call() -> list[torch.Tensor]:
        found = with_gradients(project(rows, (turned, given), offsets, bias), [rows, given, bias])
        return [*found[:2], found[2].mT if turned else found[2], found[3]]

    exact = [leaf.detach().double().requires_grad_() for leaf in (rows, weight, bias)]
    out = torch.cat([torch.nn.functional.linear(exact[0][low:high], exact[1][e], exact[2][e])
                     for e, (low, high) in enumerate(pairwise(offsets.tolist()))])
    assert_wide(call, with_gradients(out, exact), dtype, slow)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", [(1, 7, 5), (9, 1, 5), (9, 7, 1), (70, 130, 600), (3, 5000, 300), (300, 5, 5000)])
def test_a_wide_product_is_that_of_float32_rounded_once(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """In one thread and in several, by any slices; operands that lie by rows, by columns, and with gaps; sums."""
    torch.manual_seed(0)
    rows, across, columns = sizes
    panel = Panel(0, rows, [Segment(0, 0, rows, True)])
    before = torch.get_num_threads()
    for turn in (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, -1)[..., ::2]):
        left, weight = turn(torch.randn(rows, across).to(dtype)), turn(torch.randn(1, across, columns).to(dtype))
        exact, matrices = left.float() @ weight[0].float(), products.Matrices(slice(None), weight)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                out = turn(torch.ones(rows, columns, dtype=dtype))
                for add in (panel_work.NEVER, panel_work.ALWAYS):
                    want = exact + out.float() if add else exact
                    panel_work.products(
                        products.along(out, 0), products.along(left, 0), matrices.operand(), panel, dtype, add, 0)
                    error = (out.float() - want).abs() / want.abs().clamp(min=1e-1 * across**0.5)
                    assert error.max() <= 1.01 * torch.finfo(dtype).eps / 2
            finally:
                torch.set_num_threads(before)


# ---- how slow the library is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "rows"), [(0.3, (NEVER, NEVER)), (1.0, (NEVER, NEVER)), (1.8, (32, 32)), (30, (0, 4))])
def test_it_is_measured(ratio: float, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says what a processor would, and holds up a call now and then; once for each dtype."""
    asked, numbers = [], itertools.count()

    def time_product(size: int, dtype: torch.dtype) -> float:
        asked.append(dtype)
        held_up = 0.3 if next(numbers) % 3 == 1 else 0.0
        return held_up + size**3 * 1e-11 * (ratio if dtype in HALVES else 1)

    monkeypatch.setattr(panel_work, "time_product", time_product)
    monkeypatch.setattr(widening, "slowness", cache(widening.slowness.__wrapped__))
    for dtype in HALVES:
        assert widening.slowness(dtype) == pytest.approx(ratio)
        calls = len(asked)
        assert (widening.rows_from(dtype), widening.rows_from(dtype, dots=True)) == rows
        assert len(asked) == calls
    for dtype in (torch.float32, torch.float64):
        assert widening.rows_from(dtype) == NEVER
    monkeypatch.setattr(panel_work, "multiplies", lambda: False)
    assert widening.slowness.__wrapped__(torch.bfloat16) == 1.0


def test_the_measurement_leaves_no_trace() -> None:
    """torch's random numbers, threads and modes; the products themselves are run."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with Products() as made, torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        found = widening.slowness.__wrapped__(torch.float16)
    assert 0 < found < 1e4 and made.made[torch.float16] and made.made[torch.float32] and not made.made[torch.bfloat16]
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
