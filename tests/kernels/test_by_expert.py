"""Layers in one call of C, each thread with experts of its own: against the float64 loop, and which calls C takes."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from allocations import Allocations
from experts_oracle import Layer, loop, make_layer, oracle, plain_error, relative_error, run, worst_error
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels import by_expert, experts, products, widening
from moebius.kernels.contract import Options
from moebius.kernels.native import panel_work
from moebius.kernels.separate_weights import Block, experts_apart

# as test_forms.py; sums by thread round once more
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@contextlib.contextmanager
def small(threads: int, part: int = 3, wide: bool = False, slices: int = 5) -> Iterator[list[str]]:
    """Calls of any size go to C, with so many threads and such short parts; wide: 16 bits are multiplied in float32, so
    many numbers of a weight at a time. Gives what C was called for."""
    before, called = torch.get_num_threads(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(PANEL_ROWS=0, SMALL=0, PART_ROWS=part, UNEVEN=100.0, SLICE=slices).items():
            patch.setattr(by_expert, name, value)
        patch.setattr(widening, "slowness", lambda dtype: 30.0 if wide and dtype.itemsize == 2 else 1.0)
        for name in ("layer_forward", "layer_backward"):
            function = getattr(panel_work, name)
            patch.setattr(panel_work, name, lambda task, f=function, n=name: (called.append(n), f(task))[1])
        torch.set_num_threads(threads)
        try:
            yield called
        finally:
            torch.set_num_threads(before)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Sentinels, an expert twice in one token, experts without a token."""
    experts_, top_k, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 20))
    ids = st.integers(-1, experts_) if draw(st.booleans()) else st.integers(0, experts_ - 1)
    slots = st.lists(ids, min_size=top_k, max_size=top_k)
    index = torch.tensor(draw(st.lists(slots, min_size=tokens, max_size=tokens)))
    return make_layer(
        tokens, draw(st.integers(1, 9)), draw(st.integers(1, 9)), experts_, top_k, index=index,
        dtype=draw(st.sampled_from(list(TOLERANCE))), gate=draw(st.sampled_from(["concat", "interleaved", "none"])),
        activation=draw(st.sampled_from(sorted(panel_work.ACTIVATIONS))), weighted=draw(st.booleans()),
        bias=draw(st.booleans()), seed=draw(st.integers(0, 99)))


@settings(max_examples=100, deadline=None)
@given(layer=layers(), threads=st.integers(1, 4), save=st.sampled_from(["default", "recompute"]), wide=st.booleans())
def test_equals_the_loop(layer: Layer, threads: int, save: str, wide: bool) -> None:
    real = bool(((layer.index >= 0) & (layer.index < layer.gate_up.shape[0])).any())
    taken = real and (layer.index.shape[1] == 1 or threads <= max(2, layer.index.shape[1]))
    with small(threads, wide=wide) as called:
        error = worst_error(layer, backend="cpu", save=save)
    limit = max(TOLERANCE[layer.x.dtype], 2 * plain_error(layer))  # what cancellation costs the plain loop
    # each part of three rows rounds a weight's gradient to 16 bits once more, up to 27 times here
    assert error < (3 * limit if layer.x.dtype.itemsize == 2 else limit)
    assert called == (["layer_forward", "layer_backward"] if taken else [])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_the_same_bits_run_for_run_and_as_panels(wide: bool, top_k: int, dtype: torch.dtype,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread every sum is taken in the order of panels. More threads: the same each time."""
    monkeypatch.setattr(widening, "slowness", lambda dtype: 1.0)  # of the panels, whatever this machine is
    layer = make_layer(300, 64, 48, 6, top_k, dtype=dtype)

    def results() -> list[torch.Tensor]:
        out = run(layer, backend="cpu")
        return [out.detach(), *torch.autograd.grad(out, layer.leaves(), torch.ones_like(out))]

    monkeypatch.setattr(by_expert, "SMALL", 0)
    panels = results()
    for threads in (1, 3):
        with small(threads, part=512, wide=wide) as called:
            first = results()
            for _ in range(5):
                assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
        assert len(called) == 12
        if (threads == 1 or top_k == 1) and not (wide and dtype.itemsize == 2):
            assert all(torch.equal(a, b) for a, b in zip(first, panels, strict=True))


@pytest.fixture
def unwritten_is_seen() -> Iterator[None]:
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width, narrow", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [5, 700])
def test_experts_without_numbers(tokens: int, dtype: torch.dtype, width: int, narrow: int, bias: bool,
                                 unwritten_is_seen: None) -> None:
    """Nothing to add up is zero."""
    layer = make_layer(tokens, width, narrow, 3, 2, bias=bias, dtype=dtype)
    for save in ("default", "recompute"):
        assert worst_error(layer, backend="cpu", save=save) <= TOLERANCE[dtype]


def test_only_the_gradients_asked_for() -> None:
    layer = make_layer(9, 6, 4, 3, 2)
    leaves = layer.leaves()
    everything = torch.autograd.grad(run(layer, backend="cpu").sum(), leaves)
    for save in ("default", "recompute"):
        for leaf, expected in zip(leaves, everything, strict=True):
            for other in leaves:
                other.requires_grad_(other is leaf)
            with small(2) as called:
                (grad,) = torch.autograd.grad(run(layer, backend="cpu", save=save).sum(), [leaf])
            assert called == ["layer_forward", "layer_backward"]
            torch.testing.assert_close(grad, expected)


def test_strides() -> None:
    """Transposed weights, strided and transposed tokens, expanded and transposed gradients."""
    index = make_layer(11, 6, 4, 3, 2).index
    for x in (torch.randn(22, 6)[::2], torch.randn(6, 11).T, torch.randn(11, 9)[:, 2:8]):
        leaves = dict(x=x, gate_up=torch.randn(3, 6, 8).mT, down=torch.randn(3, 4, 6).mT, weight=torch.rand(2, 11).t())
        layer = Layer(index=index, **{name: tensor.requires_grad_() for name, tensor in leaves.items()})
        for grad in (torch.tensor(1.5).expand(11, 6), torch.randn(6, 11).t(), torch.randn(6).expand(11, 6)):
            with small(2) as called:
                assert worst_error(layer, grad=grad, backend="cpu") < TOLERANCE[torch.float32]
            assert len(called) == 2
            for dtype in (torch.bfloat16, torch.float16):
                halves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
                half = replace(layer, **halves)
                assert half.down.stride() == layer.down.stride()
                with small(2, wide=True) as called:
                    assert worst_error(half, grad=grad.to(dtype), backend="cpu") < 2 * TOLERANCE[dtype]
                assert len(called) == 2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("threads", [1, 2])
def test_experts_with_parameters_of_their_own(threads: int, dtype: torch.dtype) -> None:
    """Gate and up apart, one expert frozen, another without a row."""
    torch.manual_seed(0)
    layer = make_layer(20, 8, 6, 4, 2, dtype=dtype)
    layer.index = layer.index.where(layer.index != 3, 0)
    gate, up = ([part.clone() for part in layer.gate_up.detach()[:, rows]] for rows in (slice(0, 6), slice(6, 12)))
    down = [part.T.contiguous() for part in layer.down.detach()]
    leaves = [*gate, *up, *down]
    for leaf in leaves:
        leaf.requires_grad_(leaf is not gate[1])
    blocks = [Block(False, tuple(gate)), Block(False, tuple(up))], [Block(True, tuple(down))]
    with small(threads, wide=True) as called:
        out = experts_apart(layer.x, *blocks, layer.index, layer.weight, "silu", gate="concat")
        out.float().square().sum().backward()
    assert called == ["layer_forward", "layer_backward"]
    exact = layer.to(torch.float64)
    expected = loop(exact)
    expected.square().sum().backward()
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for number in range(4):
        wanted = [*exact.gate_up.grad[number].split(6), exact.down.grad[number].T]
        for leaf, grad in zip((gate[number], up[number], down[number]), wanted, strict=True):
            if leaf.requires_grad and (leaf.grad is not None or grad.any()):
                assert relative_error(leaf.grad, grad) < 2 * TOLERANCE[dtype]
    assert gate[1].grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["default", "recompute"])
def test_a_wide_product_rounds_less(save: str, dtype: torch.dtype) -> None:
    """Between H and the result nothing is rounded to 16 bits. (H is: what is kept is what is computed again.)"""
    layer, errors = make_layer(64, 48, 40, 4, 2, dtype=dtype), {}
    for wide in (False, True):
        with small(1, part=512, wide=wide, slices=200) as called:
            out = run(layer, backend="cpu", save=save)
            grads = torch.autograd.grad(out, layer.leaves(), torch.ones_like(out))
        assert called == ["layer_forward", "layer_backward"]
        exact = oracle(layer, torch.ones_like(out))
        errors[wide] = [relative_error(a, b) for a, b in zip((out, *grads), (exact[0], *exact[1]), strict=True)]
    assert all(wide < narrow for wide, narrow in zip(errors[True], errors[False], strict=True))


def test_which_calls_multiply_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    begin = by_expert.layer
    monkeypatch.setattr(by_expert, "layer", lambda *a: made.append(begin(*a)) or made[-1])

    def is_wide(layer: Layer) -> bool:
        run(layer, backend="cpu")
        return made[-1].wide

    many, few = (700, 16, 8, 8, 2), (700, 16, 8, 100, 2)  # 175 and 14 rows an expert
    for dtype in (torch.bfloat16, torch.float16):
        for slowness, wide in ((0.5, (False, False)), (1.8, (True, False)), (30.0, (True, True))):
            monkeypatch.setattr(widening, "slowness", lambda of, found=slowness: found if of.itemsize == 2 else 1.0)
            assert (is_wide(make_layer(*many, dtype=dtype)), is_wide(make_layer(*few, dtype=dtype))) == wide
            assert not is_wide(make_layer(*many))
        gaps = make_layer(*many, dtype=dtype)
        gaps.down = gaps.down.detach().repeat_interleave(2, 2)[:, :, ::2].requires_grad_()
        assert is_wide(gaps) and worst_error(gaps, backend="cpu") < TOLERANCE[dtype]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 24))
def test_a_share_holds_every_row_once(counts: list[int], threads: int, part: int) -> None:
    bounds = tuple(torch.tensor([0, *counts]).cumsum(0).tolist())
    shared = by_expert.share(bounds, threads, part, by_expert.UNEVEN)
    if shared is None:
        assert not sum(counts) or threads > 1
        return
    ends, owner, rows = shared.bounds.tolist(), dict[int, int](), list[int]()
    assert shared.groups == threads and shared.rows == sum(counts)
    for group in range(threads):
        for number in range(ends[group], ends[group + 1]):
            expert, low, high, first = shared.segments[4 * number:4 * number + 4]
            assert bounds[expert] <= low < high <= bounds[expert + 1] and high - low <= min(part, shared.room)
            assert owner.setdefault(expert, group) == group  # two threads would write into one gradient
            assert first == (low == bounds[expert])
            rows += range(low, high)
    assert sorted(rows) == list(range(sum(counts)))
    loads = [sum(counts[expert] for expert, group in owner.items() if group == one) for one in range(threads)]
    assert max(loads) <= by_expert.UNEVEN * sum(loads) / threads


def takes(layer: Layer, options: Sequence[tuple[str, str]] = ()) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        called = []
        function = panel_work.layer_forward
        patch.setattr(panel_work, "layer_forward", lambda task: (called.append(task), function(task))[1])
        run(layer, backend="cpu", **dict(options))
    return bool(called)


def test_what_stays_with_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert takes(make_layer(7, 16, 8, 8, 2, bias=True))  # small: Python would take longer than the products
    monkeypatch.setattr(by_expert, "SMALL", 0)
    size = (700, 16, 8, 8, 2)
    assert takes(make_layer(*size)) and takes(make_layer(*size, bias=True))
    assert not takes(make_layer(400, 16, 8, 8, 2))  # few rows: a gradient's room is made when H is gone
    assert not takes(make_layer(*size, dtype=torch.float64))
    assert not takes(make_layer(*size, activation="tanh(g) * u"))
    assert not takes(make_layer(*size), [("precision", "mxfp8")])
    one_has_most = torch.zeros(1400, 1, dtype=torch.int64)
    one_has_most[:300] = 1
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not takes(make_layer(1400, 16, 8, 8, 1, index=one_has_most))
    finally:
        torch.set_num_threads(before)


def test_h_that_a_hook_on_saved_tensors_gives_back_otherwise() -> None:
    layer = make_layer(20, 8, 6, 4, 2)

    def gradients(unpack: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = run(layer, backend="cpu")
        return list(torch.autograd.grad(out.sum(), layer.leaves()))

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.T.contiguous().T if tensor.shape == (40, 12) else tensor

    with small(2) as called:
        plain, ours = gradients(lambda t: t), gradients(turned)
    assert called == ["layer_forward", "layer_backward", "layer_forward"]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_of_no_token_is_an_error() -> None:
    x, order, weights = torch.randn(2, 4), torch.tensor([0, 5], dtype=torch.int32), make_layer(2, 4, 3, 1, 1)
    operands = products.Operands(*map(products.matrices, (weights.gate_up.detach(), weights.down.detach(), None, None)))
    with small(1):
        layer = by_expert.layer(x, operands, [0, 2], order, None, None, Options(), 1)
        assert layer is not None
        with pytest.raises(IndexError, match="slot 5; there are 2"):
            layer.forward()


def test_no_temporary_holds_every_rows_result() -> None:
    """T*K x D: beyond H and the result there are the threads' scratch and sums by token."""
    layer = make_layer(2000, 64, 8, 16, 8)
    x, gate_up, down, weight = (leaf.detach() for leaf in layer.leaves())
    with small(2, part=512) as called, Allocations() as made:
        experts(x, gate_up, down, layer.index, weight, backend="cpu")
    assert called == ["layer_forward"] and made.largest < 2000 * 8 * 64
