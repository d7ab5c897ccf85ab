"""``torch.autograd.Variable(tensor)`` of programs from before torch 0.4: the tensor detached, one graph."""

import itertools

import pytest
import torch
from torch.autograd import Variable

from moebius import capture, stats

WEIGHT = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
GIVEN = {
    "input": lambda x: x,
    "made": lambda x: torch.FloatTensor(3).fill_(1.5),
    "of the graph": lambda x: x * WEIGHT,
    "parameter": lambda x: WEIGHT,
    "part": lambda x: x[:2],
    "whole numbers": lambda x: x.long(),
}
HOW = {
    "alone": Variable,
    "keyword": lambda t: Variable(t, requires_grad=False),
    "position": lambda t: Variable(t, False),
    "gradient": lambda t: Variable(t, requires_grad=True),
    "gradient by position": lambda t: Variable(t, True),
    "twice": lambda t: Variable(Variable(t, requires_grad=True)),
}


def used(v, x):
    """Its number, whether it has a gradient, and the gradients that go through it."""
    grads = ()
    if v.requires_grad:
        (v * v * WEIGHT[: len(v)].detach()).sum().backward()
        grads = v.grad.clone(), v.is_leaf
    return v * 2, v.requires_grad, isinstance(v, Variable), isinstance(v, torch.Tensor), grads


def outcome(function, x):
    try:
        return str(function(x))
    except RuntimeError as error:
        return type(error), str(error)


@pytest.mark.parametrize(("given", "how"), [*itertools.product(GIVEN, HOW)])
def test_a_variable_is_its_tensor_detached(given, how):
    step = lambda x: used(HOW[how](GIVEN[given](x)), x)  # noqa: E731
    captured = capture(step, backend="eager")
    for i in range(3):
        x = torch.arange(3.0) + i
        assert outcome(captured, x.clone()) == outcome(step, x.clone())
    if "gradient" not in how and how != "twice":
        assert (stats(captured).graphs, stats(captured).breaks) == (1, 0)


def test_it_lies_in_the_tensors_memory():
    def step(x):
        v = Variable(x)
        v.add_(1)
        return v, x

    captured = capture(step, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.zeros(2)
        v, same = captured(x)
        assert same is x and v is not x and v.data_ptr() == x.data_ptr() and x.tolist() == [1, 1]


def nothing(_):
    return Variable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda t: Variable(t, volatile=True), lambda t: Variable([1.0]), nothing])
def test_other_forms_run_natively(make):
    def step(x):
        try:
            return x * 2, make(x).shape
        except TypeError as error:
            return str(error)

    assert str(capture(step, backend="eager")(torch.ones(2))) == str(step(torch.ones(2)))
