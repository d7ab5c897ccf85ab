"""Objects that a program has as keys of dicts, in sets and frozensets: which they are, and what is read in them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats


class Box:
    def __init__(self, value: float = 0.0):
        self.value = value

    def method(self) -> float:
        return self.value


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    value: float = dataclasses.field(default=0.0, compare=False)


A, B = Box(), Box()
WEIGHTS = {A: 1, B: 2}
HANDLERS = {A.method: 1, B.method: 2}
PAIRS = {(A.method, 0): 1, (B.method, 0): 2}
FROZEN = frozenset((A, B))
FROZEN_METHODS = frozenset((A.method, B.method))
WEAK = weakref.WeakKeyDictionary({A: 1, B: 2})
REFERENCE = weakref.ref(A)


def weakly(box: Box) -> float:
    return WEAK[box] if box in WEAK else 5.0


def iterations(box: Box) -> float:
    return sum(weight for key, weight in WEIGHTS.items() if key is box)


def iterations_of_methods(box: Box) -> float:
    return sum(weight for key, weight in HANDLERS.items() if key == box.method)


def iterations_of_a_frozenset(box: Box) -> float:
    return sum(1 + (key is A) for key in FROZEN if key is box)


def iterations_of_frozen_methods(box: Box) -> float:
    return sum(1 + (key == A.method) for key in FROZEN_METHODS if key == box.method)


def key_that_the_step_makes(box: Box) -> float:
    return {box.method: 3}.get(A.method, 1)


WHICH: list[Callable[[Box], float]] = [
    weakly,
    iterations,
    iterations_of_methods,
    iterations_of_a_frozenset,
    iterations_of_frozen_methods,
    key_that_the_step_makes,
    lambda box: HANDLERS.get(box.method, 7),
    lambda box: PAIRS.get((box.method, 0), 7),
    lambda box: (weakref.ref(box) is REFERENCE) + 2 * (weakref.ref(box) == REFERENCE),
    lambda box: len({weakref.ref(box), REFERENCE}),
    lambda box: sum(weight for key, weight in HANDLERS.items() if key.__self__ is box),
]


@pytest.mark.parametrize("which", WHICH)
def test_which_object_it_is(which):
    def step(box, x):
        return x + which(box)

    captured = capture(step)
    for i in range(12):
        box = (Box(), B, A)[(i * 2 + i // 5) % 3]
        assert torch.equal(captured(box, torch.zeros(1)), step(box, torch.zeros(1))), i
    assert stats(captured).entries


def written_to() -> float:
    for key in WEIGHTS:
        key.value += 1
    return A.value


WHAT: list[Callable[[], float]] = [
    written_to,
    lambda: sum(key.value for key in WEIGHTS),
    lambda: next(iter(WEIGHTS)).method(),
    lambda: sum(key.value for key in FROZEN),
    lambda: sum(key() for key in FROZEN_METHODS),
    lambda: sum(key() for key in HANDLERS),
]


@pytest.mark.parametrize("what", WHAT)
def test_what_is_read_in_it(what, monkeypatch):
    def step(x):
        return x + what()

    captured = capture(step)
    for i in range(8):
        found = []
        for run in (captured, step):
            monkeypatch.setattr(A, "value", float(i // 2))
            found.append(run(torch.zeros(1)).item())
        assert found[0] == found[1]
    assert stats(captured).hits


def test_an_equal_object_in_an_equal_frozenset():
    def step(names, x):
        return x + sum(name.value for name in names)

    captured = capture(step)
    for i in range(6):
        names = frozenset([Named("one", float(i % 3))])
        assert captured(names, torch.zeros(1)).item() == i % 3
    assert stats(captured).entries


def test_layers_with_their_own_rates_are_one_graph():
    layers = [nn.Linear(3, 3) for _ in range(3)]
    rates = {layer: 0.1 * (i + 1) for i, layer in enumerate(layers)}

    def step(x):
        total: Any = 0.0
        for layer, rate in rates.items():
            total = total + rate * layer(x).square().mean() * (2.0 if layer.training else 1.0)
        return total

    captured = capture(step)
    for i in range(6):
        layers[1].train(i != 3)
        torch.testing.assert_close(captured(torch.ones(2, 3)), step(torch.ones(2, 3)))
    assert stats(captured).entries == 2
    assert not stats(captured).breaks
