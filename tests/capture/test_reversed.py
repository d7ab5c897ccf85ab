"""Builtins that call Python code or operators from C: ``reversed`` of a sequence of the program's, ``math.prod``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moebius import capture, stats


class Sequence:
    def __init__(self, *items):
        self.items, self.asked = [*items], []

    def __len__(self):
        self.asked.append("len")
        return len(self.items)

    def __getitem__(self, position):
        self.asked.append(position)
        return self.items[position]


class Own(Sequence):
    def __reversed__(self):
        return iter([7, 8])


class Not(Sequence):
    __reversed__ = None


class Short(Sequence):
    def __len__(self):
        return 5


def folded(x, items):
    for item in reversed(items):
        x = x * item + 1
    return x


@pytest.mark.parametrize("kind", [Sequence, Own, Not, Short])
def test_sequences_in_python(kind):
    outcomes = []
    for run in (folded, capture(folded, backend="eager")):
        items, found = kind(2, 3, 5), []
        for _ in range(3):
            try:
                found.append(run(torch.ones(2), items).tolist())
            except TypeError as error:
                found.append(str(error))
            items.items[0] += 1
        outcomes.append((found, items.asked))
    assert outcomes[0] == outcomes[1]
    if kind in (Sequence, Own):
        assert stats(run).graphs and not stats(run).breaks


def test_layers_backwards():
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def step(x):
        for layer in reversed(layers):
            x = layer(x)
        return x

    captured, x = capture(step, backend="eager", fullgraph=True), torch.ones(2, 3)
    assert captured(x).equal(step(x))
    layers.append(nn.Linear(3, 3))
    assert captured(x).equal(step(x))
    layers[0] = nn.Linear(3, 3)
    assert captured(x).equal(step(x)) and stats(captured).misses == 3


def test_the_length_is_asked_at_once():
    def step(x):
        items = [1, 2, 3]
        walk = reversed(Sequence(*items))
        return x * next(walk) + sum(walk)

    assert capture(step, backend="eager")(torch.ones(1)).equal(step(torch.ones(1)))

    def changed(x):
        sequence = Sequence(1, 2, 3)
        walk = reversed(sequence)
        sequence.items.append(9)
        return x * next(walk)

    assert capture(changed, backend="eager")(torch.ones(1)).equal(changed(torch.ones(1)))


def test_registered_parametrizations_with_a_contexts_help():
    """As LoRA on experts' parameters is registered and removed around each forward."""

    class Plus(nn.Module):
        def __init__(self):
            super().__init__()
            self.delta = nn.Parameter(torch.full((3, 3), 0.5))

        def forward(self, weight):
            return weight + self.delta

    torch.manual_seed(0)
    outcomes = []
    for captured in (False, True):
        torch.manual_seed(0)
        layer, plus = nn.Linear(3, 3), Plus()
        layer.weight.requires_grad_(False)

        def step(x, layer=layer, plus=plus):
            nn.utils.parametrize.register_parametrization(layer, "weight", plus)
            with nn.utils.parametrize.cached():
                y = layer(x)
            nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            return y

        run = capture(step, backend="eager") if captured else step
        found = [run(torch.full((2, 3), float(n))).tolist() for n in range(3)]
        outcomes.append((found, layer.weight.tolist(), type(layer).__name__))
    assert outcomes[0] == outcomes[1]


PRODUCTS = {
    "numbers": lambda x: x * math.prod([2, 3.5, True]),
    "sizes": lambda x: x.reshape(math.prod(x.shape)),
    "sizes in a list": lambda x: x.reshape(-1, math.prod([s for s in x.shape[1:]])),
    "a generator": lambda x: x * math.prod(s // 2 for s in x.shape),
    "with a start": lambda x: x * math.prod((2, 3), start=0.5),
    "nothing": lambda x: x * math.prod([]),
    "tensors": lambda x: math.prod([x, x + 1], start=x),
    "no numbers": lambda x: x * math.prod(["a", "b"]),
    "nothing to go through": lambda x: x * math.prod(3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    outcomes = []
    for run in (PRODUCTS[name], capture(PRODUCTS[name], backend="eager")):
        found = []
        for size in (2, 2, 3, 5):
            try:
                found.append(run(torch.full((size, 4), 3.0)).tolist())
            except TypeError as error:
                found.append(str(error))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    if not name.startswith("no"):
        assert stats(run).graphs and not stats(run).breaks
