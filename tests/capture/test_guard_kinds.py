"""Each kind of guard is needed: with it switched off, some change goes unnoticed and the answer is wrong."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.guards import program
from moebius.hook import CHECKS
from moebius.tensors.overlaps import Overlaps


class Box:
    factor = 1.0

    def __init__(self, value=2.0):
        self.value = value

    @property
    def doubled(self):
        return self.value * 2


class OtherBox(Box):
    @property
    def doubled(self):
        return 100


def swap_class(box):
    box.__class__ = OtherBox


# kind of check -> (captured function, arguments of the first call, arguments of the second)
def case_dict():
    module: Any = torch.nn.Module()
    module.scale = 2.0

    def change():
        module.scale = 3.0
        return (module, torch.ones(2))

    return (lambda m, x: x * m.scale), (module, torch.ones(2)), change


def case_class():
    def change():
        Box.factor = 9.0
        return (Box(), torch.ones(2))

    return (lambda b, x: x * b.factor), (Box(), torch.ones(2)), change


def case_type():
    return (lambda b, x: x * b.doubled), (Box(), torch.ones(2)), lambda: (OtherBox(), torch.ones(2))


def case_tensor():
    return (lambda x: x * x.shape[0]), (torch.ones(3, 2),), lambda: (torch.ones(5, 2),)


def case_static_tensor():
    layer = torch.nn.Linear(2, 2)

    def change():
        layer.weight.requires_grad_(False)
        return (layer, torch.ones(1, 2))

    return (lambda m, x: x * (2 if m.weight.requires_grad else 3)), (layer, torch.ones(1, 2)), change


def case_equal():
    return (lambda x, k: x * k), (torch.ones(2), 2), lambda: (torch.ones(2), 3.5)


def case_is():
    return (lambda f, x: f(x)), (torch.neg, torch.ones(2)), lambda: (torch.exp, torch.ones(2))


def case_is_weak():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    return (lambda m, x: x * (2 if m is first else 3)), (first, torch.ones(2)), lambda: (second, torch.ones(2))


def case_length():
    return (lambda xs: torch.ones(1) * len(xs)), ([1, 2],), lambda: ([1, 2, 3],)


def case_contents():
    module: Any = torch.nn.Module()
    module.order = [1.0, 2.0]

    def change():
        module.order[0] = 5.0
        return (module, torch.ones(1))

    return (lambda m, x: x * sum(m.order)), (module, torch.ones(1)), change


def case_keys():
    return (lambda d, x: x * len(d)), ({"a": 1}, torch.ones(1)), lambda: ({"a": 1, "b": 1}, torch.ones(1))


def case_absent():
    return (lambda d, x: x * d.get("k", 2)), ({}, torch.ones(1)), lambda: ({"k": 5}, torch.ones(1))


def case_same():
    shared = [1.0]
    return (
        (lambda a, b, x: x * (2 if a is b else 3)),
        (shared, shared, torch.ones(2)),
        lambda: ([1.0], [1.0], torch.ones(2)),
    )


def case_distinct():
    shared = [1.0]
    return (
        (lambda a, b, x: x * (2 if a is b else 3)),
        ([1.0], [1.0], torch.ones(2)),
        lambda: (shared, shared, torch.ones(2)),
    )


def case_distinct_tensors():
    x = torch.ones(2)
    return (lambda a, b: a * (2 if a is b else 3)), (x, torch.ones(2)), lambda: (x, x)


def case_answers():
    def change():
        torch.set_grad_enabled(False)
        return (torch.ones(2),)

    return (lambda x: x * (2 if torch.is_grad_enabled() else 3)), (torch.ones(2),), change


def case_none_of():
    """Sizes change in place: of the argument alone, or of the buffer as well."""
    layer: Any = torch.nn.Module()
    layer.register_buffer("table", torch.ones(2, 3))

    def step(m, x):
        x.t_()
        rows = m.table.shape[0]
        x.t_()
        return x * rows

    return step, (layer, torch.ones(2, 3)), lambda: (layer, layer.table)


def case_instance():
    box = Box()

    def change():
        box.__class__ = OtherBox
        return (torch.ones(2),)

    return (lambda x: x * box.doubled), (torch.ones(2),), change


def case_function():
    def helper(x, k=2):
        return x * k

    def change():
        helper.__defaults__ = (7,)
        return (torch.ones(2),)

    return (lambda x: helper(x)), (torch.ones(2),), change


def case_python():
    queue = collections.deque([1.0])

    def change():
        queue.append(4.0)
        return (torch.ones(1),)

    return (lambda x: x * sum(queue)), (torch.ones(1),), change


CASES = {
    "dict": case_dict,
    "class": case_class,
    "type": case_type,
    "tensor": case_tensor,
    "static_tensor": case_static_tensor,
    "equal": case_equal,
    "is": case_is,
    "is_weak": case_is_weak,
    "length": case_length,
    "contents": case_contents,
    "keys": case_keys,
    "absent": case_absent,
    "same": case_same,
    "distinct": case_distinct,
    "python": case_python,
    "answers": case_answers,
    "none_of": case_none_of,
    "instance": case_instance,
    "function": case_function,
}


@pytest.fixture(autouse=True)
def restored():
    yield
    Box.factor = 1.0
    torch.set_grad_enabled(True)


ALSO = {"distinct tensors": case_distinct_tensors}


@pytest.mark.parametrize("kind", [*CASES, *ALSO])
def test_the_change_is_noticed(kind):
    function, before, change = (CASES | ALSO)[kind]()
    captured = capture(function)
    for args in (before, before, change()):
        torch.testing.assert_close(captured(*args), function(*args))
    assert all(r.guard and r.hint and r.line for r in stats(captured).recompiles)


def test_every_kind_that_a_program_can_have_is_here():
    assert set(CASES) == set(CHECKS)


@pytest.mark.parametrize("kind", CASES)
def test_without_the_guard_the_answer_is_wrong(kind, monkeypatch):
    original = program.CompiledGuards.__init__

    def without(self, recorder, n_positional, kwnames):
        # (that a tensor comes to be another one is noticed by the memory that they then share, too)
        recorder.facts = [f for f in recorder.facts if f.check[0] != kind and not isinstance(f.check[1], Overlaps)]
        if kind == "dict":
            recorder.dicts.clear()
        if kind == "class":
            recorder.classes.clear()
        if kind == "instance":
            recorder.instances.clear()
        original(self, recorder, n_positional, kwnames)

    monkeypatch.setattr(program.CompiledGuards, "__init__", without)
    function, before, change = CASES[kind]()
    captured = capture(function)
    captured(*before)
    args = change()
    want = function(*args)
    try:
        got = captured(*args)
    except Exception:
        return  # the stale graph cannot even run: the guard was needed
    assert not torch.equal(got, want), f"nothing depends on {kind} guards"
