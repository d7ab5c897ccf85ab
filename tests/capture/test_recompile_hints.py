"""Each recompilation is reported with the guard that failed and what the user can do about it."""

from __future__ import annotations

import collections
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
    found = [r.new for r in stats(modes()).recompiles]
    assert found == ["another grad_mode", "another grad_mode, is_inference_mode_enabled gives another answer"]


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
    assert any("key" in f"{recompile.old} {recompile.new}" for recompile in stats(step).recompiles)


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
