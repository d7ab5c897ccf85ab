"""Routing kept [batch, T, K]: ``batch, token, slot = torch.where(index == e)``, rows added at two indices."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import D, K, N
from torch.nn.functional import softmax

from moebius.lowering.experts import missed_experts


def in_place(out, at, rows):
    out[at] += rows
    return out


ADDING = {
    "out[b, t] += rows": in_place,
    "index_put_": lambda out, at, rows: out.index_put_(at, rows, accumulate=True),
    "index_put": lambda out, at, rows: out.index_put(at, rows, accumulate=True),
}


def layer(add, expert, width, reads=lambda x, out, at: x[at], at_of=lambda at: at):
    """mergoo's layers: experts of one projection or of three."""

    def run(x, moe):
        x = x.view(2, -1, D)
        weight, index = torch.topk(moe.gate(x), K)
        weight = softmax(weight, dim=2)
        out = torch.zeros((*x.shape[:-1], width), dtype=x.dtype)
        for e, own in enumerate(moe.experts):
            batch, token, slot = torch.where(index == e)
            rows = weight[batch, token, slot, None] * expert(own)(reads(x, out, (batch, token)))
            out = add(out, at_of((batch, token)), rows)
        return out

    return run


EXPERTS = {"one projection": (lambda own: own.w1, N), "three": (lambda own: own, D)}


@pytest.mark.share(4)
@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("add", ADDING)
def test_right(add, expert):
    assert compare(layer(ADDING[add], *EXPERTS[expert])) == (1, True)


@pytest.mark.share(4)
@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("add", ADDING)
def test_what_earlier_iterations_added_is_read(add, expert):
    def reads(x, out, at):
        return x[at] + out[at].mean(-1, keepdim=True)

    assert not compare(layer(ADDING[add], *EXPERTS[expert], reads))[1]


@pytest.mark.share(3)
@pytest.mark.parametrize("at_of", [lambda at: (at[0], at[1].flip(0)), lambda at: (1 - at[0], at[1])])
@pytest.mark.parametrize("add", ADDING)
def test_added_at_other_tokens(add, at_of):
    regions_of(layer(ADDING[add], *EXPERTS["one projection"], at_of=at_of))


def added_to_others(out, at, rows):
    out[at] = out[at[0], at[1].flip(0)] + rows
    return out


def subtracted(out, at, rows):
    out[at] -= rows
    return out


def doubled(out, at, rows):
    out[at] += out[at] + rows
    return out


def replaced(out, at, rows):
    out[at] = rows
    return out


@pytest.mark.share(3)
@pytest.mark.parametrize("add", [added_to_others, subtracted, doubled, replaced])
@pytest.mark.parametrize("expert", EXPERTS)
def test_added_otherwise(add, expert):
    regions_of(layer(add, *EXPERTS[expert]))


def test_switched_off(monkeypatch):
    monkeypatch.setattr(missed_experts, "added_rows", lambda node: None)
    assert not compare(layer(in_place, *EXPERTS["one projection"]))[1]
