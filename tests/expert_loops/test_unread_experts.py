"""An expert whose result nobody reads, or reads without gradients, gets no gradient in eager: not one of zeros from an
operator that the others became."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare

from moebius.lowering.experts import blocks


def left_before_it_is_added(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.mlps):
        token, slot = torch.where(index == e)
        y = expert(x[token]).flip(0)
        if e == 2:
            break
        out.index_add_(0, token, y * weight[token, slot, None], alpha=0.5)
    return out


def joined_but_for_the_last(x, moe):
    order = moe.gate(x)[:, 0].argsort()
    parts = [expert(part) for expert, part in zip(moe.experts, x[order].chunk(5), strict=False)]
    return torch.cat(parts[:-1])


def the_last_one_is_looked_at(x, moe):
    order = moe.gate(x)[:, 0].argsort()
    parts = [expert(part) for expert, part in zip(moe.experts, x[order].chunk(5), strict=False)]
    return torch.cat(parts[:-1]) * parts[-1].detach().mean()


def the_last_one_is_looked_at_without_gradients(x, moe):
    order = moe.gate(x)[:, 0].argsort()
    parts = [expert(part) for expert, part in zip(moe.biased, x[order].chunk(5), strict=False)]
    with torch.no_grad():
        scale = parts[-1].abs().mean()
    return torch.cat(parts[:-1]) * scale


FUNCTIONS = [left_before_it_is_added, joined_but_for_the_last, the_last_one_is_looked_at,
             the_last_one_is_looked_at_without_gradients]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_gradient(function):
    assert compare(function) == (1, True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_who_says_so(function, monkeypatch):
    monkeypatch.setattr(blocks, "reaching_gradients", lambda graph: set(graph.nodes))
    with pytest.raises(AssertionError):
        compare(function)
