"""Complex numbers that a step's code or arguments hold: fx writes them as text, which says another number for some."""

import itertools
import math

import pytest
import torch

from moebius import capture, stats

PARTS = (0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan)


def times(x, number):
    return x * number


def filled(x):
    return torch.full((2,), complex(-0.0, 1)) * x, x + complex(2, -0.0), torch.tensor([complex(0, -1), -1j]) * x


def bits(value):
    return [str((number.real, number.imag)) for number in value.reshape(-1).tolist()]


@pytest.mark.parametrize("backend", [None, "eager"])
def test_each_number_is_the_one_that_was_given(backend):
    x = torch.tensor([1.0, -1.0, 0.0])
    for real, imag in itertools.product(PARTS, PARTS):
        number = complex(real, imag)
        step = capture(times) if backend is None else capture(times, backend=backend)
        for _ in range(2):
            assert bits(step(x, number)) == bits(times(x, number)), number
        assert stats(step).graphs == 1 and stats(step).hits == 1


def test_constants_of_the_code():
    step = capture(filled, fullgraph=True)
    for x in (torch.ones(2), -torch.ones(2), torch.zeros(2)):
        assert list(map(bits, step(x))) == list(map(bits, filled(x)))
