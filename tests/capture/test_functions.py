"""The user's own autograd functions: forward and backward are graphs, gradients are plain Python's to the bit."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain, stats

SCALE = 2.0
CALLS = []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Gated(torch.autograd.Function):
    """Two tensors, a number, an attribute of the context, an intermediate kept, a gradient only where it is needed."""

    @staticmethod
    def forward(ctx, x, w, power, unused=None):
        gate = torch.sigmoid(x @ w)
        ctx.save_for_backward(x, w, gate)
        ctx.power = power
        return gate**power * SCALE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, w, gate = ctx.saved_tensors
        inner = gradient * SCALE * ctx.power * gate ** (ctx.power - 1) * gate * (1 - gate)
        d_x = inner @ w.t() if ctx.needs_input_grad[0] else None
        d_w = x.t() @ inner if ctx.needs_input_grad[1] else None
        return d_x, d_w, None, None


class TopOne(torch.autograd.Function):
    """Two outputs, one of them not differentiable."""

    @staticmethod
    def forward(ctx, scores):
        best, where = scores.max(-1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = scores.shape
        return best, where

    @staticmethod
    def backward(ctx, gradient, _):
        (where,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter_(-1, where[:, None], gradient[:, None])


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round() + 0.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]


def square(x, w):
    return Square.apply(x @ w).sum()


def gated(x, w):
    return Gated.apply(x, w, 3).square().mean() + Gated.apply(x.detach(), w, 2, None).mean()


def top_one(x, w):
    best, where = TopOne.apply(x @ w)
    return (best * (where + 1)).sum()


def straight_through(x, w):
    return (StraightThrough.apply(x @ w) * w).sum()


def twice_the_same(x, w):
    return Gated.apply(w, w, 2).sum() + x.sum()


FUNCTIONS = [square, gated, top_one, straight_through, twice_the_same]


def step(loss, x, w):
    x.grad = w.grad = None
    total = loss(x, w)
    total.backward()
    return total.detach(), x.grad.clone(), w.grad.clone()


@pytest.mark.parametrize("loss", FUNCTIONS)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_function_is_inside_the_graph(loss, backend):
    captured = capture(step, backend=backend)
    for _ in range(3):
        ours, theirs = captured(loss, *parameters()), step(loss, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_a_function_in_a_captured_forward_pass(loss):
    captured = capture(loss, backend="eager")
    for _ in range(2):
        mine, yours = parameters(), parameters()
        captured(*mine).backward()
        loss(*yours).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, yours, strict=True))


def test_a_function_without_gradients():
    captured = capture(lambda x: Square.apply(x) + 1, backend="eager")
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(captured(x), x * x + 1) and not captured(x).requires_grad
    assert torch.equal(captured(x.detach()), x.detach() ** 2 + 1)
    assert captured(x).requires_grad


def test_what_forward_and_backward_read_is_guarded(monkeypatch):
    captured = capture(step, backend="eager")
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        ours, theirs = captured(gated, *parameters()), step(gated, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_autograd_keeps_what_the_users_backward_reads_and_no_more():
    def kept(function):
        sizes = []
        x, w = parameters()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            function(x, w)
        return sum(sizes)

    captured = capture(gated, backend="eager")
    captured(*parameters())
    assert 0 < kept(captured) <= kept(gated)


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        CALLS.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        CALLS.append("backward")
        return gradient * 2


class OwnSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class SameTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@pytest.mark.parametrize("function", [Logs, OwnSetup, SameTensor])
def test_what_is_no_graph_is_a_break_with_plain_pythons_results(function):
    def loss(x, w):
        return (function.apply(x @ w) * w).sum()

    captured = capture(step, backend="eager")
    for _ in range(2):
        CALLS.clear()
        ours, mine = captured(loss, *parameters()), list(CALLS)
        CALLS.clear()
        theirs = step(loss, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and mine == CALLS
    assert explain(step, backend="eager")(loss, *parameters()).breaks
