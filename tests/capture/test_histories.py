"""Whether a tensor needs a gradient, where the data decides of which operators it comes: asked, relied on, in turns."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats

FLAGS = [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def loses_it_in_a_branch(x, flag, w):
    a = x @ w
    if flag[0]:
        a = x + 1
    if a.requires_grad:
        a.sum().backward()
    return a


def loses_it_in_a_branch_without_gradients(x, flag, w):
    a = x @ w
    with torch.no_grad():
        if flag[0]:
            a = x * 2
    if a.requires_grad:
        a.sum().backward()
    return a


def keeps_it_in_a_loop_without_gradients(x, flag, w):
    a = x @ w
    with torch.no_grad():
        for e in flag.nonzero():
            a = a + e
    return a, a.requires_grad


def written_in_a_branch(x, flag, w):
    a = torch.zeros_like(x)
    if flag[0]:
        a.add_(w[0])
    if a.requires_grad:
        a.sum().backward()
    return a


def a_view_is_written_in_a_loop(x, flag, w):
    a = torch.zeros_like(x)
    v = a.view(-1)
    for e in flag.nonzero():
        a[e] += w[0]
    return a, v.requires_grad, a.is_leaf


def an_argument_is_written_in_a_branch(x, flag, w):
    if flag[1]:
        x[0] = w[0]
    return x.requires_grad


def switched_on_behind_a_branch(x, flag, w):
    a = x * 1
    if flag[0]:
        a = a * w[0]
    a.requires_grad_()
    (a * 2).sum().backward()
    return a


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 1 if ctx.needs_input_grad[0] else a * 2 + b

    @staticmethod
    def backward(ctx, g):
        return g, g.sum(0)


def a_function_looks(x, flag, w):
    a = x * 1
    if flag[0]:
        a = a * w[0]
    return Looks.apply(a, w[0])


def asked_in_iterations(x, flag, w):
    a, b = x * 1, x * 1
    for _ in flag.nonzero():
        if b.requires_grad:
            a = a * 2
        b = b * w[0]
    return a, b


def asked_in_iterations_that_write(x, flag, w):
    a, b = x * 1, x * 1
    for _ in flag.nonzero():
        if b.requires_grad:
            a = a * 2
        b.add_(w[0])
    return a, b


QUESTIONS = [
    loses_it_in_a_branch,
    loses_it_in_a_branch_without_gradients,
    keeps_it_in_a_loop_without_gradients,
    written_in_a_branch,
    a_view_is_written_in_a_loop,
    an_argument_is_written_in_a_branch,
    switched_on_behind_a_branch,
    a_function_looks,
    asked_in_iterations,
    asked_in_iterations_that_write,
]


def outcome(step, flag):
    x, w = torch.arange(12.0).view(4, 3), torch.eye(3).requires_grad_()
    given = step(x, torch.tensor(flag), w)
    found = [(t.detach().tolist(), t.requires_grad) if isinstance(t, torch.Tensor) else t for t in (given, x, w.grad)]
    if isinstance(given, tuple):
        found[0] = [(t.detach().tolist(), t.requires_grad) if isinstance(t, torch.Tensor) else t for t in given]
    return found


@pytest.mark.share(14)
@pytest.mark.parametrize("step", QUESTIONS)
@pytest.mark.parametrize("first", range(len(FLAGS)))
def test_a_question_about_a_history_that_the_data_decides(step, first):
    captured = capture(step)
    for flag in FLAGS[first:] + FLAGS[:first]:
        assert outcome(captured, flag) == outcome(step, flag), flag


def goes_on_without_asking(x, flag, w):
    a, b = x @ w, torch.zeros_like(x)
    for e in flag.nonzero():
        a = a * w[0]
        b.index_add_(0, e, x[e] @ w)
    if flag[1]:
        b = b * 2
    (a + b).sum().backward()
    return a, b


def test_who_does_not_ask_stays_in_one_graph():
    captured = capture(goes_on_without_asking)
    for flag in FLAGS:
        assert outcome(captured, flag) == outcome(goes_on_without_asking, flag)
    assert stats(captured).graphs == 1 and not stats(captured).breaks


def raises_in_a_iteration(x, flag, w):
    for e in flag.nonzero():
        try:
            x = undefined + e  # noqa: F821
        except RuntimeError:
            continue
    return x


@pytest.mark.filterwarnings("error")
def test_an_error_that_a_iteration_does_not_handle_leaves_the_step():
    captured = capture(raises_in_a_iteration)
    for flag in FLAGS:
        raised = []
        for function in (raises_in_a_iteration, captured):
            try:
                raised.append(outcome(function, flag))
            except NameError as error:
                raised.append(str(error))
        assert raised[0] == raised[1], flag
