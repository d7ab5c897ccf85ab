"""An expert whose result nobody reads, or reads without gradients, gets no gradient in eager: not one of zeros from an
operator that the others became."""

from __future__ import annotations

import itertools

import pytest
import torch
from beside_eager import compare
from spellings import E

from moebius.lowering.experts import blocks, rewrite


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


# ----------------------------------------------------------------------------------------------------------------------
# What a branch behind the expert decides
# ----------------------------------------------------------------------------------------------------------------------

LOOKED_UP = {
    "where": "t, k = torch.where(index == e)\ng = weight[t, k, None]",
    "any": "t = (index == e).any(-1).nonzero().squeeze(-1)\ng = (weight * (index == e)).sum(-1)[t, None]",
}
UNDECIDED = {  # whether it is never so, sometimes, always
    "a sum of it": "y.sum() {} 0",
    "without history": "y.detach().mean() {} 0",
    "some rows": "len(t) {} 4",
    "a weight": "g.mean() {} 0.55",
}
BEHIND = {
    "continue": "if {}:\n    continue\nout.index_add_(0, t, y * g)",
    "if": "if {}:\n    out.index_add_(0, t, y * g)",
    "both": "if {}:\n    out.index_add_(0, t, y * g)\nelse:\n    out.index_add_(0, t, y * g, alpha=0.5)",
}
BEFORE = {"": "", "no rows": "if t.numel() == 0:\n    continue", "counted": "counts[e] = len(t)"}


def written(rows, condition, sign, behind, before):
    asked = BEHIND[behind].format(UNDECIDED[condition].format(sign))
    lines = "\n".join((LOOKED_UP[rows], BEFORE[before], "y = moe.mlps[e](x[t])", asked)).splitlines()
    text = "def layer(x, moe):\n    weight, index = moe.route(x)\n"
    text += "    out, counts = torch.zeros_like(x), torch.zeros(E)\n"
    text += "    for e in range(E):\n" + "".join(f"        {line}\n" for line in lines)
    text += "    return out + weight.sum()\n"
    namespace = {"torch": torch, "E": E}
    exec(compile(text, f"<layer: {rows}, {condition}, {behind}>", "exec"), namespace)
    return namespace["layer"], text


FORMS = list(itertools.product(LOOKED_UP, UNDECIDED, "<>", BEHIND, BEFORE))


@pytest.mark.share(16)
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_a_branch_behind_it_decides(form):
    layer, text = written(*form)
    compare(layer, text=text)


@pytest.mark.parametrize("behind", ["continue", "if"])
def test_who_asks_branches(behind, monkeypatch):
    monkeypatch.setattr(rewrite, "all_are_read", lambda *_: None)
    layer, text = written("where", "a sum of it", ">", behind, "")
    with pytest.raises(AssertionError):
        compare(layer, text=text)
