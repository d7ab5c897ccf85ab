"""A token's experts differ: as many tokens chose an expert as there are slots that name it. A branch within which the
two meet is a region then. Where a token may have an expert twice, or somebody wrote into what was asked, it is not
known, and the program runs as plain Python does."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from moebius import capture, stats

D, E, K = 4, 3, 2


def chosen(scores):
    return scores.topk(K, -1).indices


def with_twice(scores):  # the best one, and the best one but for the first
    return torch.stack([scores.argmax(-1), scores[:, 1:].argmax(-1) + 1], -1)


def copied(scores):
    return scores.topk(K, -1)[1].clone().contiguous()


def written(scores):
    index = scores.topk(K, -1).indices.clone()
    index[:, 1] = index[:, 0]
    return index


def written_by_data(scores):
    index = scores.topk(K, -1).indices.clone()
    index.data[:, 1] = index[:, 0]
    return index


INDICES = [chosen, copied, with_twice, written, written_by_data]


def mask_for_slots(weight, index, e):
    mask = index == e
    return mask.any(-1).nonzero().flatten(), weight[mask]


def slots_of_tokens(weight, index, e):
    tokens = (index == e).any(dim=1)
    return tokens, weight[tokens][index[tokens] == e]


def slots_twice(weight, index, e):
    return torch.where(index == e)[0], weight[index == e]


def of_another(weight, index, e):
    tokens = (index == e).any(-1)
    return tokens, weight[tokens][index[tokens] == (e + 1) % E]


def along_tokens(weight, index, e):
    mask = index == e
    return mask.any(0).nonzero().flatten(), weight[mask]


READINGS = [mask_for_slots, slots_of_tokens, slots_twice, of_another, along_tokens]
FEW = [(chosen, one) for one in READINGS[:3]] + [(copied, one) for one in READINGS[:3]]


class Layer(nn.Module):
    def __init__(self, index, reading):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.index, self.reading = index, reading

    def forward(self, x):
        scores, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        index = self.index(scores)
        weight = scores.gather(1, index)
        for e, expert in enumerate(self.experts):
            if (index == e).any():
                tokens, own = self.reading(weight, index, e)
                out[tokens] += expert(x[tokens]) * own.view(-1, 1)
        return out


def outcome(call, x):
    try:
        return call(x).detach()
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.share(5)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize(("index", "reading"), [*itertools.product(INDICES, READINGS)], ids=lambda part: part.__name__)
def test_as_in_eager(index, reading, backend):
    torch.manual_seed(0)
    layer = Layer(index, reading)
    captured, generator = capture(layer, backend=backend), torch.Generator().manual_seed(1)
    for rows in (5, 5, 1, 2, 7, 1, 3):
        x = torch.randn(rows, D, generator=generator)
        ours, plain = outcome(captured, x), outcome(layer, x)
        if isinstance(plain, type):
            assert ours is plain
        else:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("index", "reading"), FEW, ids=lambda part: part.__name__)
def test_the_branch_is_a_region(index, reading):
    """What data decide in a training step is captured for both ways at once."""
    torch.manual_seed(0)
    layer, generator = Layer(index, reading), torch.Generator().manual_seed(1)

    @capture
    def step(x):
        layer(x).square().sum().backward()

    for rows in (5, 5, 1, 2, 7, 1, 3):
        step(torch.randn(rows, D, generator=generator))
    counts = stats(step)
    assert counts.breaks == 0 and not [one for one in counts.recompiles if one.guard == "branch on data"]
