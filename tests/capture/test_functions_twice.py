"""The user's own autograd functions, differentiated twice by whoever gets their results; gradients that are None."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moebius import capture, stats
from moebius.regions import functions


def cube(backward):
    """x to the third, with this backward of the saved x and the gradient."""

    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

    if backward is not None:
        Cube.backward = staticmethod(backward)
    return Cube


def plain(ctx, g):
    (x,) = ctx.saved_tensors
    return 3 * x * x * g


def constant_factor(ctx, g):
    (x,) = ctx.saved_tensors
    with torch.no_grad():
        factor = 3 * x * x
    return factor * g


def nested_blocks(ctx, g):
    (x,) = ctx.saved_tensors
    with torch.no_grad():
        with torch.enable_grad():
            factor = 3 * x
        factor = factor * x
    with torch.set_grad_enabled(False):
        g = g * 1
    return factor * g + plain(ctx, g) * 0


@torch.no_grad()
def tripled(x):
    return 3 * x


def decorated(ctx, g):
    (x,) = ctx.saved_tensors
    return tripled(x) * x * g


def all_of_it(ctx, g):
    with torch.no_grad():
        return plain(ctx, g)


def recomputed(ctx, g):
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((leaf**3).sum(), leaf)
    return slope * g


def asks(ctx, g):
    return plain(ctx, g) if torch.is_grad_enabled() else plain(ctx, g) * 1.0


CASES = [plain, constant_factor, nested_blocks, decorated, all_of_it, recomputed, once_differentiable(plain), asks]
NAMES = [getattr(case, "__name__", "") for case in CASES[:6]] + ["once", "asks"]


def second(function, x):
    """The gradient of a gradient, or the error."""
    x = x.detach().requires_grad_()
    try:
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        first.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return first.detach(), x.grad


def both(backward, backend="eager"):
    apply = cube(backward).apply

    def forward(x):
        return apply(x * 2).square().sum()

    captured = capture(forward, backend=backend)
    x = torch.linspace(-1, 1, 5)
    return captured, [second(captured, x) for _ in range(2)], second(forward, x)


def equal(found, want):
    if isinstance(want, str) or isinstance(found, str):
        return found == want
    return all(map(torch.equal, found, want))


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("backward", CASES, ids=NAMES)
def test_a_gradient_of_a_gradient(backward, backend):
    captured, found, want = both(backward, backend)
    assert all(equal(f, want) for f in found)
    assert stats(captured).breaks == (backward is asks)


@pytest.mark.parametrize("backward", CASES[1:4], ids=NAMES[1:4])
def test_where_grad_mode_is_put_back_as_traced_it_is_another(backward, monkeypatch):
    monkeypatch.setattr(functions, "put_back_mode", lambda graph: None)
    _, found, want = both(backward)
    assert not equal(found[0], want)


def test_what_is_differentiable_once_is_an_error(monkeypatch):
    assert "once_differentiable" in both(once_differentiable(plain))[1][0]
    monkeypatch.setattr(functions, "ONCE", None)
    _, found, want = both(once_differentiable(plain))
    assert not equal(found[0], want)


# ----------------------------------------------------------------------------------------------------------------------
# set_materialize_grads(False)
# ----------------------------------------------------------------------------------------------------------------------


class Best(Function):
    """The other result has no gradient, and backward is told so."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        best, where = x.max(-1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return best, where, 5

    @staticmethod
    def backward(ctx, gradient, of_where, of_five):
        (where,) = ctx.saved_tensors
        factor = 2 if of_where is None and of_five is None else 7
        return torch.zeros(ctx.shape).scatter_(-1, where[:, None], gradient[:, None]) * factor


class Pair(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return sum(g * k for g, k in ((a, 2), (b, float("inf"))) if g is not None)


@pytest.mark.parametrize(("function", "breaks"), [(Best, False), (Pair, True)])
def test_gradients_that_are_none(function, breaks):
    def step(w, x):
        w.grad = None
        function.apply(x @ w)[0].sum().backward()
        return w.grad

    captured, w = capture(step, backend="eager"), torch.randn(4, 4, requires_grad=True)
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(captured(w, x), step(w, x))
    assert bool(stats(captured).breaks) == breaks
