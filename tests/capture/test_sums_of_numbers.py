"""``sum`` of numbers: from Python 3.12 on it gives back what additions of floats lose, and ``+`` does not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moebius import capture, explain

KINDS = {
    "float": lambda rng, n: rng.uniform(-1, 1) * 10.0 ** rng.randrange(-12, 12),
    "varying float": lambda rng, n: n * 0.1,
    "int": lambda rng, n: rng.randrange(-9, 9),
    "varying int": lambda rng, n: n,
    "bool": lambda rng, n: rng.random() < 0.5,
    "complex": lambda rng, n: complex(0.1, rng.random()),
    "float64": lambda rng, n: np.float64(0.1),
}


@pytest.mark.share(13)
@pytest.mark.parametrize("seed", range(300))
def test_sums_have_plain_pythons_bits(seed):
    drawn = random.Random(seed)
    kinds = drawn.sample(sorted(KINDS), drawn.randrange(1, 4))
    chosen = [drawn.choice(kinds) for _ in range(drawn.randrange(1, 12))]
    start = drawn.choice([(), (0.1,), (-0.0,), (3,)])
    batches = [[KINDS[kind](random.Random(f"{seed} {i}"), n) for i, kind in enumerate(chosen)] for n in (1, 2, 3, 2, 5)]

    def step(x, numbers):
        return x + 1, sum(numbers, *start), sum((number * 3 for number in numbers), *start)

    captured = capture(step, backend="eager")
    for numbers in batches:
        assert repr(captured(torch.ones(1), numbers)) == repr(step(torch.ones(1), numbers))


def test_what_is_added_is_added_when_it_comes():
    def step(x):
        held = x * 1
        return sum(held.add_(1) for _ in range(3))

    x = torch.arange(3.0)
    report = explain(step, backend="eager")(x)
    assert torch.equal(report.result, step(x)) and report.breaks == []


def test_numbers_that_the_step_computes_are_one_graph():
    def step(x):
        losses = [(x * i).sum().item() for i in range(4)]
        return sum(losses), sum(losses, 0.1) / len(losses)

    x = torch.rand(5) / 3
    report = explain(step, backend="eager")(x)
    assert report.result == step(x) and report.breaks == []


@pytest.mark.parametrize("start", ["", b"", bytearray()], ids=repr)
def test_texts_are_refused_as_python_does(start):
    def step(x):
        try:
            return sum(["a"], start)
        except TypeError as error:
            return str(error)

    assert capture(step, backend="eager")(torch.ones(1)) == step(torch.ones(1))
