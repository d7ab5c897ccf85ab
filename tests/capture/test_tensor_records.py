"""What a tensor is besides its numbers and sizes: a leaf, a view, shared, made in inference mode. What is asked of one
tensor must not answer for another that looks alike."""

from __future__ import annotations

import pytest
import torch

from moebius import capture
from moebius.guards.recorder import GuardRecorder


def kinds():
    source = torch.arange(4.0).requires_grad_()
    kept = source * 1
    kept.retain_grad()
    given = torch.arange(4.0).requires_grad_()
    given.grad = torch.ones(4)
    with torch.inference_mode():
        made_there = torch.arange(4.0)
    return {
        "plain": torch.arange(4.0),
        "view": torch.arange(8.0)[:4],
        "leaf": torch.arange(4.0).requires_grad_(),
        "computed": source * 1,
        "retains its gradient": kept,
        "has a gradient": given,
        "view of a leaf": torch.arange(8.0).requires_grad_()[:4],
        "shared": torch.arange(4.0).share_memory_(),
        "inference": made_there,
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "frozen parameter": torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    }


QUESTIONS = {
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "retains_grad": lambda x: x.retains_grad,
    "is_view": lambda x: (x._is_view(), x[1:]._is_view(), torch.Tensor._is_view(x)),
    "base": lambda x: (x._base is None, x[1:]._base is x, x[1:]._base is x._base),
    "is_shared": lambda x: (x.is_shared(), torch.Tensor.is_shared(x)),
    "is_inference": lambda x: (x.is_inference(), torch.is_inference(x), (x * 2).is_inference()),
    "grad": lambda x: (x._grad is None, x.grad is None),
    "of a result": lambda x: ((x * 2).is_leaf, x.detach().is_leaf, x[0].is_leaf),
    "output number": lambda x: (x.output_nr, x.unbind()[1].output_nr, torch.var_mean(x)[1].output_nr),
    "documentation": lambda x: (x.__doc__, x.__module__),
}


def check(question):
    captured = capture(question)
    for _ in range(2):
        for kind, x in kinds().items():
            assert captured(x) == question(x), kind


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_of_the_tensor_that_is_there(name):
    check(QUESTIONS[name])


def backward(x):
    (x * 2).sum().backward()
    return x.grad


def steps(captured):
    for leaf in (True, False, True, False):
        found = []
        for function in (captured, backward):
            source = torch.ones(3, requires_grad=True)
            gradient = function(source.detach().requires_grad_() if leaf else source * 1)
            found.append((gradient is None, source.grad is None))
        assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_gradient_goes_to_a_leaf_or_through_what_is_none():
    steps(capture(backward))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_guard_is_needed(monkeypatch):
    check_ = GuardRecorder.check

    def unless_leaf(self, kind, source, *operands, **kwargs):
        return source.name.endswith(".is_leaf") or check_(self, kind, source, *operands, **kwargs)

    monkeypatch.setattr(GuardRecorder, "check", unless_leaf)
    with pytest.raises(AssertionError):
        check(QUESTIONS["is_leaf"])
    with pytest.raises((AssertionError, RuntimeError)):  # another gradient, or an error where there is none
        steps(capture(backward))


def test_a_base_that_is_an_argument_is_that_argument():
    def one(view, x):
        return view._base is x, x._base is None

    captured, x = capture(one), torch.arange(4.0)
    for view, other in ((x[1:], x), (x[1:], x), (x.clone()[1:], x), (x, x[1:])):
        assert captured(view, other) == one(view, other)


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x[:2], x[2:]

    @staticmethod
    def backward(ctx, first, second):
        return torch.cat((first, second))


def test_which_output_of_a_function_a_tensor_is():
    def step(x):
        return [half.output_nr for half in Halves.apply(x)]

    x = torch.arange(4.0).requires_grad_()
    assert capture(step)(x) == step(x) == [0, 1]


def test_what_autograd_has_saved_is_unpacked_where_the_program_reads_it():
    log = []

    def unpack(x):
        log.append("unpacked")
        return x

    def made():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            y = torch.ones(3, requires_grad=True).exp()
        return y.grad_fn

    def step(node):
        log.append("begin")
        total = node._saved_result.sum().item()
        log.append("between")
        return total + node._saved_result.sum().item(), node.name(), len(node.next_functions)

    expected = [step(made()) for _ in range(2)]
    plain = [*log]
    log.clear()
    captured = capture(step)
    assert [captured(made()) for _ in range(2)] == expected
    assert log == plain


def test_functions_of_python_are_applied_to_the_numbers():
    def step(x):
        y = (x * 2).apply_(lambda number: number + 1)
        y.map_(x, lambda a, b: a * b)
        return y + 1

    x = torch.arange(4.0)
    assert capture(step, backend="eager")(x).tolist() == step(x).tolist()


def test_operators_on_lists_in_place_give_the_list():
    def step(x):
        given = [x * 1, x * 2]
        found = torch._foreach_add_(given, 1)
        pair = (x * 1, x * 2)
        return found is given, torch._foreach_mul_(pair, pair) is pair, found, torch._foreach_add(given, 1) is given

    x = torch.arange(3.0)
    assert str(capture(step, backend="eager")(x)) == str(step(x))
