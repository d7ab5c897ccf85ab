"""A branch on data between a call of an autograd.Function and its backward: either way may change what backward reads,
and backward then reads that."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius import capture, stats


class Scale:
    value = 2.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * Scale.value + 0.0 * x


weight = torch.ones(3, requires_grad=True)


def required(answer):
    """An assertion; pytest rewrites those of a test."""
    if not answer:
        raise ValueError("not so")


def gradient(y):
    y.sum().backward()
    found, weight.grad = weight.grad, None
    return found, Scale.value


def an_if(y):
    if y.sum() > 0:
        Scale.value = 3.0
    return gradient(y)


def what_no_node_can_say(y):
    if y.sum() > 0:
        Scale.value = 3.0
        print(end="")
    return gradient(y)


def a_backward_in_one_way(y):
    while y.sum() <= 0:
        return gradient(y)
    Scale.value = 9.0
    return gradient(y)


def a_backward_in_both(y):
    if y.sum() > 0:
        Scale.value = 7.0
        return gradient(y)
    return gradient(y)


def an_error_handled_here(y):
    try:
        required(y.sum() <= 0)
    except ValueError:
        Scale.value = 7.0
    return gradient(y)


def an_error_handled_outside(y):
    try:
        return a_requirement(y)
    except ValueError:
        Scale.value = 5.0
        return gradient(y)


def a_requirement(y):
    required(y.sum() <= 0)
    return gradient(y)


def a_requirement_and_an_if(y):
    required(y.sum() <= 5)
    return an_if(y)


def an_early_return(y):
    if y.sum() > 0:
        return y.detach(), Scale.value
    Scale.value = 4.0
    return gradient(y)


FORMS = [an_if, what_no_node_can_say, a_backward_in_one_way, a_backward_in_both, an_error_handled_here]
FORMS += [an_error_handled_outside, a_requirement, a_requirement_and_an_if, an_early_return]


@pytest.mark.share(14)
@pytest.mark.parametrize("first", [-1.0, 1.0])
@pytest.mark.parametrize("before", ["nothing", "a branch"])
@pytest.mark.parametrize("form", FORMS)
def test_backward_reads_what_the_way_left(form, before, first):
    """before: a branch that only raises, so that the graph has side exits before the call is met."""

    def step(x):
        Scale.value = 2.0
        if before == "a branch" and x.sum() > 100:
            raise ValueError("too large")
        return form(Scaled.apply(weight * x))

    def answer(run, value):
        weight.grad = None
        try:
            return repr(run(torch.ones(3) * value))
        except ValueError as error:
            return f"{error}, {Scale.value}"

    captured = capture(step, backend="eager")
    for value in (first, first, -first, first, -first, -3.0, 1.0, 1.5, 2.0, -1.0):
        assert answer(captured, value) == answer(step, value), value


def test_a_check_of_what_it_gives_is_no_graph_break():
    def step(x):
        y = Scaled.apply(weight * x)
        required(torch.isfinite(y).all())
        return gradient(y)

    captured = capture(step, backend="eager")
    for value in (1.0, 2.0, -1.0):
        Scale.value = 2.0
        assert repr(captured(torch.ones(3) * value)) == repr(step(torch.ones(3) * value))
    assert not stats(captured).breaks and stats(captured).misses == 1
    with pytest.raises(ValueError):
        captured(torch.full((3,), float("nan")))


@pytest.mark.parametrize("order", [*itertools.permutations(("function", "branch", "break"))], ids="-".join)
def test_a_break_that_stays_leaves_it_to_python(order):
    """What runs after a break may change what backward reads: then the function is not in the graph before it."""

    def step(x):
        Scale.value, y = 2.0, weight * x
        for what in order:
            if what == "function":
                y = Scaled.apply(y)
            elif what == "branch":
                required(torch.isfinite(y).all())
            else:
                Scale.value = len(list(torch.arange(int(y.sum().abs()) + 3)))  # a length that the data decides
        return gradient(y)

    captured = capture(step, backend="eager")
    for value in (1.0, 2.0, -1.0, 3.0, 1.0):
        assert repr(captured(torch.ones(3) * value)) == repr(step(torch.ones(3) * value))
