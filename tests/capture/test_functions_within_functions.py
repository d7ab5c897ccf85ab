"""An ``autograd.Function`` that another one's forward applies records nothing: it is in the graph of that forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import Function

from moebius import capture, stats


class Clipped(Function):
    """Its gradient is not that of what its forward does."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        y = (x * scale).relu()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 3 * g * (y > 0.5), None


class Two(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(n := (x > 0).sum())
        return x * scale, n

    @staticmethod
    def backward(ctx, g, _):
        return 2 * g + ctx.saved_tensors[0], None


class Apart(Function):
    @staticmethod
    def forward(x, scale):
        return x.exp() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g * 2, None


class Same(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x

    @staticmethod
    def backward(ctx, g):
        return 5 * g, None


class Dirty(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.mark_dirty(x)
        return x.mul_(scale)

    @staticmethod
    def backward(ctx, g):
        return 5 * g, None


INNER = {"clipped": Clipped, "two": Two, "apart": Apart, "same": Same, "dirty": Dirty}
IN_THE_GRAPH = ("clipped", "two", "apart")


def first(found):
    return found[0] if isinstance(found, tuple) else found


def in_forward(inner):
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = first(inner.apply(x * 1, 2))
            ctx.save_for_backward(x, y)
            assert not y.requires_grad
            return y * 2

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * x.cos() + y

    return Outer


def in_backward(inner):
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return first(inner.apply(g * ctx.saved_tensors[0], 2))

    return Outer


def deeper(inner):
    middle = in_forward(inner)

    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = middle.apply(x + 1)
            ctx.save_for_backward(y)
            return y.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    return Outer


WHERE = {"forward": in_forward, "backward": in_backward, "deeper": deeper}


def once(outer, w, x):
    w.grad = None
    y = outer.apply(x @ w)
    y.sum().backward()
    return y.detach(), w.grad.clone()


def twice(outer, w, x):
    w.grad = None
    y = outer.apply(x @ w)
    (g,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    (y.sum() + g.square().sum()).backward()
    return y.detach(), w.grad.clone()


def unrecorded(outer, w, x):
    with torch.no_grad():
        return outer.apply(x @ w), w


def also_alone(outer, w, x):
    w.grad = None
    y = outer.apply(x @ w)
    (y.sum() + Clipped.apply(x @ w, 3).sum()).backward()
    return y.detach(), w.grad.clone()


CALLS = [once, twice, unrecorded, also_alone]


@pytest.mark.share(4)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("where, inner", [*itertools.product(WHERE, INNER)])
def test_one_within_another_is_as_plain(where, inner, call, backend):
    outer = WHERE[where](INNER[inner])

    def step(w, x):
        return call(outer, w, x)

    def told(step, w, x):
        try:
            return step(w, x)
        except RuntimeError as error:
            return (type(error),)

    captured = capture(step, backend=backend)
    torch.manual_seed(0)
    for rows in (4, 4, 5, 6, 4):
        x, w = torch.randn(rows, 3), torch.randn(3, 3)
        ours, plain = (told(f, w.clone().requires_grad_(), x) for f in (captured, step))
        assert len(ours) == len(plain)
        for mine, theirs in zip(ours, plain, strict=True):
            if isinstance(theirs, torch.Tensor):
                near = 0 if backend == "eager" else 1e-6
                torch.testing.assert_close(mine, theirs, rtol=near, atol=near, equal_nan=True)
            else:
                assert mine is theirs
    if call is once and inner in IN_THE_GRAPH and where != "backward":
        assert not stats(captured).breaks


def test_where_it_is_refused_the_graph_breaks(monkeypatch):
    is_forward = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr("moebius.tensors.graphs.GraphScope.is_forward", is_forward, raising=False)
    with pytest.raises(AssertionError):
        test_one_within_another_is_as_plain("forward", "clipped", once, "eager")
