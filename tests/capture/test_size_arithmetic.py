"""Python's arithmetic on a size that varies: each expression in a step of its own, beside plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of

EXPRESSIONS = """
n / 2; n // 2; n % 3; n ** 2; n ** 0.5; math.sqrt(n); math.floor(n / 2); math.ceil(n / 2); round(n / 3); max(n, m)
min(n, m); abs(n - 5); -n; n / m; math.log2(n); 2 ** n; n * 1.5; n / 2.5; (n + m) // 3 * 2; round(n * 0.33, 1)
math.cos(n); divmod(n, 3); n << 1; n >> 1; n & 1; n ^ 3; math.prod([n, m]); sum([n, m]); 1 / n; -(-n // 4); n == 4
str(n); pow(n, 2, 7); n // 2 / 3; (n / 2) // 1; n / 2 % 1; n ** -0.5; max(n, 4); math.ceil(n * 0.3)
math.trunc(n * 0.7); round(n * 0.33); math.floor(n * 0.3); n / 3 - n / 4; n / 2 ** 3; n / 2 > 2
list(range(0, n, 2)); [0] * n; f"{n / 2:.3f}"; (n * 0.7) // 1; -((n * 0.7) // -1)
"""


@pytest.mark.share(15)
@pytest.mark.parametrize("expression", [e.strip() for e in EXPRESSIONS.strip().replace("\n", ";").split(";")])
def test_a_size_is_a_number(expression):
    names = {"math": math}
    exec(f"def step(x):\n    n, m = x.shape\n    return x * 2, {expression}\n", names)
    captured = capture(names["step"])
    for rows in (3, 4, 5, 6, 7, 9):
        x = torch.ones(rows, 2)
        want, got = names["step"](x), captured(x)
        assert got[1] == want[1] and type(got[1]) is type(want[1])
        assert torch.equal(got[0], want[0])
    assert stats(captured).breaks == 0
    assert not captured_of(captured).given_up


def test_numbers_that_the_graph_computes_beside_sizes():
    def step(x, n):
        mean = x.mean().item()
        total = mean * len(x) + n * 0.5
        beside = (mean == n, mean != n, mean < len(x), total == len(x), max(mean, len(x)), total // n, -mean + n)
        return x * 2, total / n, f"{mean / len(x):.3f}", [bool(b) if b is True or b is False else b for b in beside]

    captured = capture(step, backend="eager", dynamic=True)
    for n in (3, 4, 5, 4, 7):
        for value in (float(n), n + 0.5, -1.0):
            x = torch.full((n, 2), value)
            assert str(captured(x, n)) == str(step(x, n))


def test_a_number_is_equal_to_a_size_where_it_is():
    def step(x):
        mean = x.mean().item()
        return x * 2, mean == len(x), mean != len(x)

    captured = capture(step, backend="eager", dynamic=True)
    for n in (3, 4, 5):
        assert captured(torch.full((n, 2), float(n)))[1:] == (True, False)
        assert captured(torch.full((n, 2), n + 0.5))[1:] == (False, True)
    assert stats(captured).breaks == 0
