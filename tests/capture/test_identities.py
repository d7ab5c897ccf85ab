"""Which object it is: compared, looked up and hashed by identity, the answer is that of this call's object."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from typing import Any

import pytest
import torch

from moebius import capture, stats


class Box:
    def method(self):
        return self


def inner():
    def function(x):
        return x * 2

    return function


def over_a_cell(k=2):
    def function(x):
        return x * k

    return function


MAKERS = {
    "object": Box,
    "inner function": inner,
    "closure": over_a_cell,
    "lambda": lambda: lambda x: x,
    "module": torch.nn.ReLU,
    "partial": lambda: functools.partial(inner, 2),
    "bound method": lambda: Box().method,
    "list": lambda: [1],
    "dict": dict,
    "set": set,
    "tensor": lambda: torch.ones(2),
    "tuple": lambda: (Box(), 1),
    "tuple of tensors": lambda: (torch.ones(2), 1),
}
UNHASHABLE = {"list", "dict", "set"}


def questions(first: Any, second: Any, hashable: bool, compared: bool) -> dict[str, Any]:
    holder = types.SimpleNamespace(a=first)
    asked: dict[str, Any] = {
        "is": lambda o, x: x * (2 if o is first else 5),
        "is, the other way round": lambda o, x: x * (2 if first is o else 5),
        "is not": lambda o, x: x * (2 if o is not first else 5),
        "an attribute is": lambda o, x: x * (2 if holder.a is o else 5),
        "id": lambda o, x: x * (2 if id(o) == id(first) else 5),
        "either is": lambda o, x: x * (2 if o is first or o is second else 5),
    }
    if compared:
        asked |= {
            "==": lambda o, x: x * (2 if o == first else 5),
            "in a tuple": lambda o, x: x * (2 if o in (first,) else 5),
            "index": lambda o, x: x * ([first, second, o].index(o) + 2),
            "count": lambda o, x: x * [first].count(o),
            "lists": lambda o, x: x * (2 if [o] == [first] else 5),
            "tuples": lambda o, x: x * (2 if (o, 1) == (first, 1) else 5),
        }
    if compared and hashable:
        table = {first: 2}
        asked |= {
            "key": lambda o, x: x * {first: 2}.get(o, 5),
            "key of a dict from outside": lambda o, x: x * table.get(o, 5),
            "key of a new dict": lambda o, x: (lambda d: x * d.get(first, 5))({o: 2}),
            "in a set": lambda o, x: x * (2 if o in {first} else 5),
            "a set of two": lambda o, x: x * len({o, first}),
            "part of a key": lambda o, x: x * {(first, 1): 2}.get((o, 1), 5),
            "hash": lambda o, x: x * (2 if hash(o) == hash(first) else 5),
        }
    return asked


def told(function, *args):
    try:
        return repr(function(*args))
    except ValueError as error:
        return type(error).__name__


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", MAKERS)
def test_another_object_of_the_kind_is_another_one(kind):
    make = MAKERS[kind]
    first, second = make(), make()
    asked = questions(first, second, kind not in UNHASHABLE, kind not in {*UNHASHABLE, "tensor", "tuple of tensors"})
    for order in ((first, second, first, make()), (second, first, make(), first)):
        for name, step in asked.items():
            captured = capture(step)
            for obj in order:
                x = torch.ones(2)
                assert told(captured, obj, x) == told(step, obj, x), (name, order.index(obj))


def test_what_is_reached_in_two_ways_is_one_object():
    box: Any = Box()
    box.k = 1

    def step(b, x):
        box.k = 2
        return x * b.k

    captured = capture(step)
    for b in (box, Box(), box, Box()):
        b.k = 1
        assert captured(b, torch.ones(1)).item() == (2 if b is box else 1)


@pytest.mark.parametrize("make", [lambda: (Box(), 1), lambda: (torch.ones(2), 1), lambda: ([1], 1)])
def test_a_tuple_that_goes_through_a_step_stays_one_object(make):
    captured = capture(lambda t, u, x: (t, [u], x * (2 if t is u else 3)))
    t, u = make(), make()
    for first, second in ((t, t), (t, u), (u, t), (u, u)):
        a, (b,), y = captured(first, second, torch.ones(1))
        assert a is first and b is second and y.item() == (2 if first is second else 3)


def test_functions_made_anew_in_each_call_are_one_graph():
    captured = capture(lambda f, x: f(x))
    for make in (inner, over_a_cell, MAKERS["lambda"]):
        for _ in range(6):
            f = make()
            assert torch.equal(captured(f, torch.ones(2)), f(torch.ones(2)))
    assert stats(captured).entries == 3, stats(captured).recompiles


def test_the_same_code_over_other_globals_is_another_function():
    code = compile("def make(k):\n    def f(x):\n        return x * k * G\n    return f", "made", "exec")
    spaces: list[dict[str, Any]] = [{"G": 2}, {"G": 3}]
    for space in spaces:
        exec(code, space)
    captured = capture(lambda f, x: f(x))
    for space in (*spaces, *spaces):
        assert captured(space["make"](1), torch.ones(1)).item() == space["G"]


def test_what_was_compared_is_not_kept_alive():
    table: dict[Any, int] = {}
    captured = capture(lambda o, x: x * table.get(o, 5))

    def call():
        box = Box()
        captured(box, torch.ones(1))
        return weakref.ref(box)

    alive = [call() for _ in range(3)]
    gc.collect()
    assert [r() for r in alive] == [None] * 3


class Slotted:
    __slots__ = ("k",)


def of_a_cell():
    k = 1

    def put(value):
        nonlocal k
        k = value

    return put, lambda: k


def with_attributes(cls):
    made = cls()
    made.k = 1
    return made


def put_attribute(owner, value):
    owner.k = value


def put_item(owner, value):
    owner[0] = value


# what makes one piece of state, and what puts a number into it and reads it
SHARED: dict[str, tuple[Any, Any, Any]] = {
    "cell": (of_a_cell, lambda both, value: both[0](value), lambda both: both[1]()),
    "slot": (lambda: with_attributes(Slotted), put_attribute, lambda o: o.k),
    "attribute": (lambda: with_attributes(Box), put_attribute, lambda o: o.k),
    "attribute of a tensor": (lambda: with_attributes(lambda: torch.ones(1)), put_attribute, lambda o: o.k),
    "list": (lambda: [1], put_item, lambda o: o[0]),
    "list's length": (lambda: [1], list.append, len),
    "dict": (lambda: {0: 1}, put_item, lambda o: o[0]),
    "order of a dict": (lambda: {7: 1, 5: 2}, lambda o, value: o.__setitem__(7, o.pop(7)), lambda o: next(iter(o))),
    "set": (lambda: {1}, set.add, len),
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_is_written_by_one_name_is_read_by_another_where_they_are_one(kind):
    make, put, get = SHARED[kind]

    def step(writer, reader, x):
        put(writer, 5)
        return x * get(reader)

    def run(function):
        one = make()
        pairs = [(make(), make()), (one, one), (make(), make()), (one, make())]
        return [function(*pair, torch.ones(1)).item() for pair in pairs]

    assert run(capture(step)) == run(step)


def tied():
    m = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    m[1].weight = m[0].weight
    return m


def seen_once(m, scales):
    seen, total = set(), 0
    for p in (p for layer in m for p in (layer.weight, layer.bias)):
        if id(p) not in seen:
            seen.add(id(p))
            total = total + p.sum() * scales.get(id(p), 1.0)
    return total * len(seen)


CHANGES = {
    "nothing": lambda m: None,
    "untied": lambda m: setattr(m[1], "weight", torch.nn.Parameter(m[1].weight.detach() * 3)),
    "another": lambda m: setattr(m[0], "bias", torch.nn.Parameter(torch.ones(4))),
    "data": lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)),
    "swapped": lambda m: m.__setitem__(0, m[1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_id_of_a_parameter_is_known_while_it_is_the_same_object(change):
    m = tied()
    scales = {id(m[0].bias): 5.0, id(m[1].weight): 2.0}
    step = capture(lambda: seen_once(m, scales), backend="eager")
    for _ in range(2):
        assert torch.equal(step(), seen_once(m, scales))
    assert not stats(step).breaks and stats(step).hits == 1
    CHANGES[change](m)
    for _ in range(2):
        assert torch.equal(step(), seen_once(m, scales))
