"""A generator that yields inside a loop over experts: what the experts are taken from × who takes what it yields.

An iteration that is recorded for all experts cannot hand its values out, so such a loop is unrolled or breaks the
graph. No internal error (it would be a warning), and plain Python's results."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebius import capture, stats

E, D, N, K = 4, 6, 8, 2


def of_range(index):
    return range(E)


def of_hits(index):
    return F.one_hot(index, E).sum((0, 1)).nonzero()[:, 0]


def of_unique(index):
    return index.unique()


def of_numbers(index):
    return index.unique().tolist()


def all_iterations(layer, experts, index):
    for e in experts:
        token, slot = torch.where(index == e)
        yield token, slot, e


def used_iterations(layer, experts, index):
    for e in experts:
        token, slot = torch.where(index == e)
        if len(token) == 0:
            continue
        yield token, slot, e


def inner_iterations(layer, experts, index):
    yield from used_iterations(layer, experts, index)


def zipped(pieces, out):
    tokens, values = zip(*pieces, strict=True)
    return out.index_add_(0, torch.cat(tokens), torch.cat(values))


def listed(pieces, out):
    pairs = list(pieces)
    return out.index_add_(0, torch.cat([t for t, _ in pairs]), torch.cat([v for _, v in pairs]))


def iterated(pieces, out):
    for token, value in pieces:
        out.index_add_(0, token, value)
    return out


class Layer(nn.Module):
    def __init__(self, source, iterations, taker):
        super().__init__()
        self.router, self.source, self.iterations, self.taker = nn.Linear(D, E, bias=False), source, iterations, taker
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, N, D))

    def forward(self, x):
        weight, index = self.router(x).softmax(-1).topk(K)

        def pieces():
            for token, slot, e in self.iterations(self, self.source(index), index):
                yield token, F.silu(x[token] @ self.w1[e]) @ self.w2[e] * weight[token, slot, None]

        return self.taker(pieces(), torch.zeros_like(x))


@pytest.mark.share(3)
@pytest.mark.parametrize("source", [of_range, of_hits, of_unique, of_numbers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("iterations", [all_iterations, used_iterations, inner_iterations], ids=lambda f: f.__name__)
@pytest.mark.parametrize("taker", [zipped, listed, iterated], ids=lambda f: f.__name__)
def test_generator_of_experts(source, iterations, taker):
    torch.manual_seed(0)
    layer = Layer(source, iterations, taker)
    captured = capture(layer, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, n in enumerate((8, 8, 2)):
            x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(captured(x), layer(x))
    if (source, iterations) == (of_range, all_iterations):
        assert stats(captured).breaks == 0
