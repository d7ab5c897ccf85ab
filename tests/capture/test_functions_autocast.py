"""Autocast around and inside of a user's autograd function: backward casts as it does where it runs, to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch

from moebius import capture, stats
from moebius.python import switches
from moebius.regions.functions import AutogradFunctions
from moebius.torch_facts import torch_private


class OwnBlock(torch.autograd.Function):
    """Backward switches autocast for a part of what it does."""

    on = True

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @classmethod
    def parts(cls, ctx, gradient):
        x, w = ctx.saved_tensors
        with torch.autocast("cpu", torch.bfloat16, enabled=cls.on):
            inner = gradient.float() @ w.t()
        return inner.float(), x.t().float() @ gradient.float()

    @staticmethod
    def backward(ctx, gradient):
        return OwnBlock.parts(ctx, gradient)


class Off(OwnBlock):
    on = False

    @staticmethod
    def backward(ctx, gradient):
        return Off.parts(ctx, gradient)


class Asks(OwnBlock):
    """Which way backward goes depends on what an operator gives there."""

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        inner = gradient.float() @ w.t()
        return inner.float() * (2 if inner.dtype == torch.bfloat16 else 3), x.t().float() @ gradient.float()


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient @ w.t()).float(), (x.t() @ gradient).float()


class Scaled(torch.autograd.Function):
    """Nothing in it is cast."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w[0]

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w[0] * 2, torch.zeros_like(w)


def around(function, model, w, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = function.apply(model(x), w)
    return y.float().square().sum()


def train_outside(function, model, w, x):
    loss = around(function, model, w, x)
    loss.backward()
    return loss.detach()


def train_inside(function, model, w, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = function.apply(model(x), w).float().square().sum()
        loss.backward()
    return loss.detach()


def train_backward_alone(function, model, w, x):
    loss = function.apply(model(x), w).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return loss.detach()


def grad_elsewhere(function, model, w, x):
    loss = around(function, model, w, x)
    with torch.autocast("cpu", torch.float16):
        return torch.autograd.grad(loss, [w, *model.parameters()])


STEPS = (train_outside, train_inside, train_backward_alone, grad_elsewhere)
FUNCTIONS = (OwnBlock, Off, Asks, Decorated, Scaled)


def same(step, function, casts=False, calls=3):
    """Calls of the captured step beside plain ones, under autocast or not."""
    runs = []
    for run in (step, captured := capture(step, backend="eager")):
        torch.manual_seed(0)
        model, w = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4, 4))
        found = []
        for _ in range(calls):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                found.append(run(function, model, w, torch.randn(3, 4)))
            assert not torch.is_autocast_enabled("cpu")
        runs.append((found, [None if p.grad is None else p.grad for p in (w, *model.parameters())]))
    assert all(torch.equal(a, b) for a, b in zip(flat(runs[0]), flat(runs[1]), strict=True))
    return stats(captured)


def flat(value):
    return (
        [value] if not isinstance(value, list | tuple) else [t for part in value for t in flat(part) if t is not None]
    )


@pytest.mark.share(16)
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("step", STEPS)
def test_backward_is_cast_as_where_it_runs(step, function, casts):
    seen = same(step, function, casts)
    assert seen.graphs == 1 and seen.breaks == 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_backward_of_a_captured_forward_pass(function):
    def run(forward):
        torch.manual_seed(0)
        model, w = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4, 4))
        for casts in (False, True):
            loss = forward(function, model, w, torch.randn(3, 4))
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss.backward()
        return [w.grad, *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, run(capture(around, backend="eager")), run(around)))


def test_it_is_interpreted_for_each(monkeypatch):
    """With what autocast is at the call alone, the answer is wrong."""
    monkeypatch.setattr(torch_private, "autocast_as", lambda state: contextlib.nullcontext())
    monkeypatch.setattr(AutogradFunctions, "is_unchanged", lambda *_: True)
    with pytest.raises(AssertionError):
        same(train_outside, OwnBlock)


class Recomputes(torch.autograd.Function):
    """Backward casts a weight, with nothing around it that forgets the copy."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            inner = torch.mm(gradient, ctx.w)
        return inner.float().detach(), x.t().float() @ gradient.float()


def train(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = Recomputes.apply(x, w)
    y.float().square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        return x @ w


def trained(function):
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(4, 4))
    return [*(function(w, torch.randn(3, 4)).detach() for _ in range(4)), w.detach()]


def test_a_copy_of_a_weight_that_backward_casts_is_forgotten(monkeypatch):
    plain = trained(train)
    assert all(map(torch.equal, trained(capture(train, backend="eager")), plain))
    monkeypatch.setattr(switches, "leave_autocast", torch.autocast_decrement_nesting)
    try:
        assert not all(map(torch.equal, trained(capture(train, backend="eager")), plain))
    finally:
        torch.clear_autocast_cache()
