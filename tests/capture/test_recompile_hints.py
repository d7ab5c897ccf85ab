"""Each recompilation is reported with the guard that failed and what the user can do about it."""

from __future__ import annotations

import collections
import enum
from typing import Any

import pytest
import torch

from moebius import capture, stats


class Config:
    def __init__(self) -> None:
        self.name, self.items, self.table, self.choice = "a", [1.0], {"a": 1.0}, None


def names():
    config = Config()
    step = capture(lambda x: x * (2 if config.name == "a" else 3))
    for name in "abcd":
        config.name = name
        step(torch.ones(2))
    return step


def lists():
    config = Config()
    step = capture(lambda x: x * sum(config.items))
    for _ in range(2):  # (after that it is a log, and read after a graph break)
        config.items.append(1.0)
        step(torch.ones(2))
    return step


def tables():
    config = Config()
    step = capture(lambda x: x * sum(config.table.values()))
    for key in "bcd":
        config.table[key] = 1.0
        step(torch.ones(2))
    return step


def called_with(function, *calls):
    def case():
        step = capture(function)
        for args in calls:
            step(*args)
        return step

    return case


def modes():
    step = capture(lambda x: x * 2)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            step(torch.ones(2))
    return step


def frozen():
    layer = torch.nn.Linear(2, 2)
    step = capture(layer)
    for wanted in (True, False):
        layer.weight.requires_grad_(wanted)
        step(torch.ones(2, 2))
    return step


def train_and_eval():
    layer = torch.nn.Dropout(0.5)
    step = capture(layer)
    for wanted in (True, False):
        layer.train(wanted)
        step(torch.ones(2))
    return step


def gradients():
    layer = torch.nn.Linear(2, 2)
    step = capture(lambda x: x if layer.weight.grad is None else x * layer.weight.grad.sum())
    for gradient in (None, torch.ones(2, 2)):
        layer.weight.grad = gradient
        step(torch.ones(2))
    return step


def turned(x, n):
    for _ in range(n):
        x = x * 2
    return x


ONES = torch.ones(2)
CASES: dict[str, tuple[Any, str, str]] = {  # case, the guard, what stands in its hint
    "a text that is asked for": (names, "config.name", "text"),
    "a list that grows": (lists, "config.items", "tensor"),
    "keys of a dict": (tables, "config.table", "keys"),
    "dtypes": (called_with(lambda x: x * 2, (ONES,), (ONES.double(),), (ONES.int(),)), "L['x']", "dtype"),
    "dimensions": (called_with(lambda x: x * 2, (ONES,), (ONES[None],)), "L['x']", "dimensions"),
    "sizes": (called_with(lambda x: x * 2, (ONES,), (torch.ones(3),)), "L['x']", "moebius.mark_dynamic(x, (0,))"),
    "a count of iterations": (called_with(turned, *((ONES, n) for n in range(2, 5))), "L['n']", "few ways"),
    "train and eval": (train_and_eval, ".training", "train() or eval()"),
    "a gradient that is there": (gradients, "weight'].grad", "zero them"),
    "deques": (
        called_with(lambda x, q: x * q[0], *((ONES, collections.deque(range(n))) for n in (1, 2, 3))), "L['q']", "keep",
    ),
    "arguments": (called_with(lambda x, k=1: x * k, (ONES,), (ONES, 2)), "form of the call", "by the same names"),
    "switches": (modes, "torch", "state"),
    "a parameter that is frozen": (frozen, "weight", "requires_grad"),
}  # fmt: skip


def test_the_switch_that_was_thrown_is_named():
    assert [r.change for r in stats(modes()).recompiles] == [
        "torch's grad_mode was False, is True",
        "torch's state was grad_mode True, inference mode False, is grad_mode False, inference mode True",
    ]


class Point:
    def __init__(self, side):
        self.side = side

    def area(self, x):
        return x * self.side


class Cube(Point):
    pass


Colour = enum.Enum("Colour", "RED BLUE")
TWICE = [torch.ones(2), torch.ones(2)]
CHANGES = {  # what the step does with its arguments, those of its calls, and what the last of them changed
    "len(items) was 2, is 3": (lambda x, items: x * sum(items), [1, 2], [1, 2, 3]),
    "items[0] was 1, is 5": (lambda x, items: [x * i for i in items], [1, 2], [5, 2]),
    "len(t) was 2, is 3": (lambda x, t: x * len(t), (1, 2), (1, 2, 3)),
    "len(q) was 1, is 2": (lambda x, q: x * len(q), collections.deque([1]), collections.deque([1, 2])),
    "q[1] was 2, is 3": (lambda x, q: x * q[1], collections.deque([1, 2]), collections.deque([1, 3])),
    "d.keys() was {'a'}, is {'a', 'b'}": (lambda x, d: [x * v for v in d.values()], {"a": 1}, {"a": 1, "b": 2}),
    "d.keys() was {'a', 'b'}, is {'b', 'a'}": (
        lambda x, d: [x * v for v in d.values()], {"a": 1, "b": 2}, {"b": 2, "a": 1},
    ),
    "d['b'] was missing, is 2": (lambda x, d: x * d.get("b", 1), {"a": 1}, {"b": 2}),
    "s was {1, 2}, is {1, 3}": (lambda x, s: x * 2 if 3 in s else x, {1, 2}, {1, 3}),
    "n was of type float, is of type str": (lambda x, n: x * n if type(n) is float else x, 2.5, 3.5, "a"),
    "c was of type Point, is of type Cube": (lambda x, c: c.area(x), Point(1), Cube(1)),
    "c.side was 1, is 2": (lambda x, c: c.area(x), Point(1), Point(2)),
    "c was Colour.RED, is Colour.BLUE": (lambda x, c: x * 2 if c is Colour.RED else x, *Colour),
    "f was relu, is sigmoid": (lambda x, f: f(x), torch.relu, torch.sigmoid),
    "r was range(0, 2), is range(0, 3)": (lambda x, r: [x * i for i in r], range(2), range(3)),
    "s was torch.Size([2, 1]), is torch.Size([1, 2])": (
        lambda x, s: x.view(s), torch.Size([2, 1]), torch.Size([1, 2]),
    ),
    "p[0] is p[1] was False, is True": (lambda x, p: x * p[0] * p[1], TWICE, [TWICE[0]] * 2),
}  # fmt: skip


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_is_told_as_the_program_writes_it(said):
    function, *given = CHANGES[said]
    step = capture(function)
    for value in given:
        step(torch.ones(2), value)
    assert stats(step).recompiles[-1].change == said


def test_the_changed_part_of_a_function_is_named():
    def helper(x, k=1):
        return x * k

    step = capture(lambda x: helper(x))
    step(torch.ones(2))
    helper.__defaults__ = (2,)
    step(torch.ones(2))
    helper.__code__ = (lambda x, k: x + k).__code__
    step(torch.ones(2))
    names = [recompile.guard.rpartition(".")[2] for recompile in stats(step).recompiles]
    assert names == ["__defaults__", "__code__"]


@pytest.mark.parametrize("case", CASES)
def test_each_recompilation_names_its_guard_and_a_remedy(case):
    make, guard, text = CASES[case]
    recompiles = stats(make()).recompiles
    assert recompiles and all(r.guard and r.hint and r.old and r.new for r in recompiles), recompiles
    assert guard in recompiles[-1].guard and text in recompiles[-1].hint, recompiles[-1]


def test_a_relation_of_sizes_is_told_by_the_arguments_names():
    step = capture(turned)
    for n in range(2, 5):
        step(ONES, n)
    assert "n == 3 was True, is False (n is 4)" in stats(step).recompiles[1].change


def test_tensors_as_keys_are_told_apart_without_comparing_them():
    first, second = torch.ones(3), torch.ones(3)
    keyed = {first: 1.0}

    @capture
    def step(x):
        return x * sum(keyed.values())

    step(torch.ones(2))
    keyed[second] = 2.0
    assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    del keyed[first]
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert any("keys()" in recompile.guard for recompile in stats(step).recompiles)


class Asked(dict):
    """Makes what it is asked for, and notices who asks."""

    def __missing__(self, key):
        self[key] = 0
        return 0

    def get(self, key, default=None):
        self["asked"] = key
        return super().get(key, default)


@pytest.mark.parametrize("kind", [Asked, lambda: collections.defaultdict(list)])
def test_to_say_what_changed_asks_no_dict_of_the_users(kind):
    def step(x, known):
        return known["a"] + x if "a" in known else x * 2

    captured, known, x = capture(step, backend="eager"), kind(), torch.ones(3)
    for entry in (torch.ones(3), None, 2.0, None, torch.ones(2, 1), None):
        known.clear()
        if entry is not None:
            known["a"] = entry
        before = list(known)
        assert torch.equal(captured(x, known), step(x, known)) and list(known) == before
