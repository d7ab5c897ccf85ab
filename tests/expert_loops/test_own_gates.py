"""Gates of all tokens of which an iteration takes its own at its tokens: ``(weight * (index == e)).sum(-1)[mask]``."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import E

from moebius.lowering.experts.reader import RULES


def layer(gate, index_of=lambda index: index, asks=lambda mask: mask.sum() > 0):
    """``for i, expert in enumerate(experts)``, tokens by a mask, ``if mask.sum() > 0``."""

    def run(x, moe):
        weight, index = moe.route(x)
        index = index_of(index)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            mask = (index == e).any(dim=-1)
            if asks(mask):
                out[mask] += expert(x[mask]) * gate(weight, index, e, mask)
        return out

    return run


def scattered(weight, index):
    return torch.zeros(len(weight), E, dtype=weight.dtype).scatter(1, index, weight)


RIGHT = {
    "summed": lambda w, index, e, mask: (w * (index == e)).sum(-1)[mask].unsqueeze(1),
    "cast": lambda w, index, e, mask: (w * (index == e).to(w.dtype)).sum(dim=1)[mask][:, None],
    "kept axis": lambda w, index, e, mask: ((index == e) * w).sum(-1, keepdim=True)[mask],
    "as a column": lambda w, index, e, mask: (w * (index == e)).sum(-1).unsqueeze(-1)[mask],
    "of all experts": lambda w, index, e, mask: scattered(w, index)[:, e][mask].unsqueeze(1),
}
WRONG = {
    "of the next expert": lambda w, index, e, mask: (w * (index == (e + 1) % E)).sum(-1)[mask].unsqueeze(1),
    "summed over tokens": lambda w, index, e, mask: (w * (index == e)).sum(0)[:1].expand(len(w))[mask].unsqueeze(1),
    "other slots": lambda w, index, e, mask: (w * (index.flip(1) == e)).sum(-1)[mask].unsqueeze(1),
    "weights of other slots": lambda w, index, e, mask: (w.flip(1) * (index == e)).sum(-1)[mask].unsqueeze(1),
    "of the others": lambda w, index, e, mask: (w * (index != e)).sum(-1)[mask].unsqueeze(1),
    "the largest": lambda w, index, e, mask: (w * (index == e)).amax(-1)[mask].unsqueeze(1),
    "integers": lambda w, index, e, mask: ((w * 10).long() * (index == e)).sum(-1)[mask].unsqueeze(1),
    "narrower": lambda w, index, e, mask: (w.float() * (index == e)).sum(-1)[mask].unsqueeze(1),
    "written": lambda w, index, e, mask: (w * (index == e)).sum(-1).mul_(2)[mask].unsqueeze(1),
    "of all tokens": lambda w, index, e, mask: (w * (index == e)).sum().view(1, 1),
    "one column further": lambda w, index, e, mask: scattered(w, index)[:, e - 1][mask].unsqueeze(1),
    "the whole row": lambda w, index, e, mask: scattered(w, index)[e][index[mask]].sum(-1, keepdim=True),
}
INDICES = {
    "an expert twice": lambda index: index[:, :1].expand(-1, 2).contiguous(),
    "one expert": lambda index: index.clone().fill_(1),
    "turned": lambda index: index.flip(0),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", RIGHT)
def test_right_gates(name):
    graphs, (region,) = regions_of(layer(RIGHT[name]))
    assert graphs == 1 and region.lowered and region.top_k == 2


@pytest.mark.share(6)
@pytest.mark.parametrize("name", WRONG)
def test_other_gates(name):
    regions_of(layer(WRONG[name]))


@pytest.mark.parametrize("name", ["of the next expert", "of the others", "the largest", "one column further"])
def test_other_gates_are_no_routing_weights(name):
    """What it multiplies by is right, and is not one of the token's own two weights."""
    assert regions_of(layer(WRONG[name]))[1][0].top_k != 2


@pytest.mark.parametrize("gate", ["summed", "kept axis"])
@pytest.mark.parametrize("name", INDICES)
def test_other_indices(name, gate):
    regions_of(layer(RIGHT[gate], INDICES[name]))


@pytest.mark.parametrize("operator", ["mul", "sum"])
def test_switched_off(monkeypatch, operator):
    monkeypatch.setitem(RULES, operator, [r for r in RULES[operator] if "rules_gates" not in r.__module__])
    assert regions_of(layer(RIGHT["summed"]))[1][0].top_k != 2


def test_gates_of_another_index_than_the_rows():
    """What a token's second expert is worth, at the tokens whose first expert it is."""

    def second(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            (token,) = torch.where(index[:, 0] == e)
            gate = (weight * (index == e)).sum(-1)
            out.index_add_(0, token, moe.experts[e](x[token]) * gate[token, None])
        return out

    regions_of(second)


def test_weights_that_a_iteration_writes():
    def written(x, moe):
        weight, index = moe.route(x)
        weight, out = weight.clone(), torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            token, slot = torch.where(index == e)
            gate = (weight * (index == e)).sum(-1)[token]
            out.index_add_(0, token, expert(x[token]) * gate.unsqueeze(-1))
            with torch.no_grad():
                weight += 0.5
        return out

    assert not regions_of(written, errors=(RuntimeError,))[1] or not compare(written, errors=(RuntimeError,))[1]
