"""Objects whose death is seen: they die where they do in plain Python, since the frame that makes one runs natively."""

from __future__ import annotations

import weakref

import pytest
import torch
from answers import broken

from moebius import capture
from moebius.codegen import resume
from moebius.python import construction

LOG: list = []


class Mortal:
    def __init__(self, number):
        self.number = number

    def __del__(self):
        LOG.append(self.number)


class Plain:
    pass


def made_and_dropped(x, number):
    mortal = Mortal(number)
    LOG.append("made")
    return x * mortal.number


def in_order(x):
    first, second = Mortal(1), Mortal(2)
    y = made_and_dropped(x, 3)
    broken()
    first = None
    LOG.append("first is gone")
    y = y + made_and_dropped(x, 4)
    several = [Mortal(5), Mortal(6)]
    several.pop(0)
    LOG.append("popped")
    broken()
    several.clear()
    LOG.append("end")
    return y, first, second.number


def left_by_an_error(x):
    kept = Mortal(1)
    try:
        other = Mortal(2)
        broken()
        raise ValueError(kept.number, other.number)
    except ValueError:
        LOG.append("handled")
    LOG.append("after")
    broken()
    return x[torch.tensor([8])]


def referred_to_weakly(x):
    plain = Plain()
    reference = weakref.ref(plain, lambda _: LOG.append("dead"))
    there = reference() is plain
    broken()
    del plain
    return there, reference() is None, x * 2


def held_weakly_by_key(x):
    mortal, held = Mortal(1), weakref.WeakValueDictionary()
    held["a"] = mortal
    before = len(held)
    mortal = Mortal(2)
    after = len(held)
    broken()
    return before, after, x * mortal.number


PROGRAMS = [in_order, left_by_an_error, referred_to_weakly, held_weakly_by_key]


def told(program):
    LOG.clear()
    try:
        result = program(torch.ones(2))
    except IndexError as error:
        return str(error), [*LOG]
    return [v.tolist() if isinstance(v, torch.Tensor) else v for v in result], [*LOG]


@pytest.mark.parametrize("program", PROGRAMS)
def test_dies_where_it_does_in_plain_python(program):
    captured = capture(program)
    for _ in range(3):
        assert told(captured) == told(program)


# (held_weakly_by_key's object is held by the stopped frame alone, which is left before the rest runs)
@pytest.mark.parametrize("program", [in_order, left_by_an_error, referred_to_weakly])
def test_in_the_rest_after_a_break_it_would_die_later(program, monkeypatch):
    monkeypatch.setattr(construction, "OBSERVED", "")
    assert told(capture(program)) != told(program)


def hooked_module(x):
    module = torch.nn.Sigmoid()
    module.register_full_backward_hook(lambda module, before, after: LOG.append(after[0].sum().item()))
    module(x).backward(torch.ones(2))
    return x.grad


def hooked_module_of_a_class(x):
    class Own(torch.nn.Sigmoid):
        pass

    module = Own()

    def hook(module, before, after):
        LOG.append(after[0].sum().item())

    module.register_full_backward_hook(hook)
    module(x).backward(torch.ones(2))
    LOG.append(x.grad.sum().item())
    return x.grad


def hooked_module_called_deeper(x):
    hooked_module_result(x).backward(torch.ones(2))
    return x.grad


def hooked_module_result(x):
    module = torch.nn.Linear(2, 2)
    module.register_full_backward_hook(lambda module, before, after: LOG.append(after[0].sum().item()))
    broken()
    torch.nn.init.ones_(module.weight)
    y = module(x)
    module.eval()
    broken()
    (y * 2).sum().backward()
    return y.detach().requires_grad_() * x


def hooked_node(x):
    node = x.view_as(x).grad_fn.next_functions[0][0]
    node.register_hook(lambda before, after: setattr(x, "grad", after[0] * 10))
    torch.mul(x, 2).sum().backward()  # (a function that knows nothing of torch would run natively as one piece)
    return x.grad


def run_with_a_leaf(step):
    LOG.clear()
    torch.manual_seed(0)
    found = [step(torch.ones(2, requires_grad=True)) for _ in range(2)]
    return [t.tolist() for t in found], [*LOG]


@pytest.mark.parametrize("step", (hooked_module, hooked_module_of_a_class, hooked_module_called_deeper, hooked_node))
def test_what_hooks_belong_to_lives_as_long_as_its_frame(step):
    assert run_with_a_leaf(capture(step, backend="eager")) == run_with_a_leaf(step)


def test_without_that_they_are_lost(monkeypatch):
    monkeypatch.setattr(resume, "is_held", lambda name, value: False)
    assert run_with_a_leaf(capture(hooked_node, backend="eager")) != run_with_a_leaf(hooked_node)
