"""Numbers that the step computes of its inputs and uses as sizes: what torch assumes of such a size is a guard."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats


def of_a_float(part):
    return int(part * 4)


def of_a_comparison(part):
    return [part > n / 8 for n in range(8)].count(True)


def of_a_sum(part):
    return sum([part * 8 > n for n in range(8)])


def of_a_power(part):
    return round(2 ** (part * 3))


def which_way(x, n):
    y = x[:n]
    return y * 2 if y.shape[0] > 3 else y * 3


def dimensions(x, n):
    return x[:n].squeeze(0).dim(), x[:n, None].expand(n, 4, 2).is_contiguous()


def broadcast(x, n):
    return x[:n] + x[:1], torch.ones(n, 1) + torch.ones(1, n)


def halves(x, n):
    return torch.ones(n).view(-1, 2).sum(0) if n % 2 == 0 else torch.ones(n)


def joined(x, n):
    out = torch.zeros(8, 2)
    out[:n] = x[:n]
    return torch.cat([x[:n], out[: 8 - n]]), out.t().reshape(-1)[: n * 2]


PARTS = [1.0, 0.75, 0.5, 0.7, 0.3, 0.9, 0.1, 0.0, 1.0, 0.6]
MADE = [of_a_float, of_a_comparison, of_a_sum, of_a_power]
USED = [which_way, dimensions, broadcast, halves, joined]


@pytest.mark.share(16)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("used", USED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("made", MADE, ids=lambda f: f.__name__)
def test_each_size_is_plain_pythons(made, used, backend):
    def step(x, part):
        return used(x, made(part))

    captured = capture(step, backend=backend)
    for part in PARTS:
        x = torch.arange(16.0).view(8, 2)
        torch.testing.assert_close(captured(x, part), step(x, part), rtol=0, atol=0)
    assert stats(captured).graphs
