"""Floats computed from sizes that vary, as a capacity of experts is: Python rounds after each operator."""

from __future__ import annotations

import math

import pytest
import torch

from moebius import capture, stats


def products(x):
    return x * (len(x) * 0.1 * 3), len(x) * 0.1 * 3 > 3, 0.1 * (len(x) * 3.0) * 0.7


def sums(x):
    n = len(x)
    return x * (n * 0.1 + n * 0.2), n * 0.1 + 0.2 + 0.3 <= 1.1, 2 * (n * 0.1 + 0.3), -(n * 0.1) * 3


def capacity(x):
    n = len(x)
    each = max(min(n, int(1.25 * n / 4)), 4)
    return x[:each] * 2, torch.zeros(each, 2), int(n * 0.1 * 3), int(n * 2 * 0.7 / 4), int(-n * 0.3 * 0.7)


def rounded(x):
    n = len(x) / 4 * 1.1
    return x * float(max(len(x), 7)), x[: math.ceil(n)], x[math.floor(n * 0.3) :], math.trunc(-n), math.ceil(2.5)


def same(a, b):
    assert type(a) is type(b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("function", [products, sums, capacity, rounded])
def test_every_size(function, backend):
    captured = capture(function, backend=backend)
    for n in range(2, 40):
        x = torch.linspace(-1, 1, n, dtype=torch.float64)
        for found, expected in zip(captured(x), function(x), strict=True):
            assert same(found, expected), (n, found, expected)


@pytest.mark.parametrize("function", [capacity, rounded])
def test_one_graph_for_all_sizes(function):
    """What tensors have such a size is no graph for each size."""
    captured = capture(lambda x: function(x)[0], dynamic=True)
    for n in range(20, 40):
        captured(torch.ones(n))
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0
