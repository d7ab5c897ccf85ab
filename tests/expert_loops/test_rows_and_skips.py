"""Rows of an expert however they are found × where an iteration ends early × how weights are kept and multiplied × how
rows are added × what is counted beside: each layer is one operator, and equal to eager in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from beside_eager import regions_of
from module_layers import Layer
from spellings import D, E, K

from moebius.lowering import aliasing, operators
from moebius.lowering.experts import blocks, written_out
from moebius.lowering.experts.hoisted_conditionals import Opening

BEGIN = """
def layer(x, moe):
    weight, index = moe.route(x)
    out, capacity, flat = torch.zeros_like(x), 5, weight.reshape(-1)
    order = index.flatten().argsort(stable=True)
    counts = index.flatten().bincount(minlength=E).tolist()
    starts = [sum(counts[:e]) for e in range(E)]
    for e in range(E):
"""
ROWS = {  # the tokens t, their weights g [n, 1]
    "where": "t, k = torch.where(index == e)\ng = weight[t, k, None]",
    "any": "t = (index == e).any(-1).nonzero().squeeze(-1)\ng = (weight * (index == e)).sum(-1)[t, None]",
    "first": "t, k = torch.where(index == e)\nt, k = t[:capacity], k[:capacity]\ng = weight[t, k, None]",
    "first if more": "t, k = torch.where(index == e)\nif t.numel() > capacity:\n    t, k = t[:capacity], k[:capacity]\n"
    "g = weight[t, k, None]",
    "best if more": "t, k = torch.where(index == e)\ng = weight[t, k]\nif t.numel() > capacity:\n"
    "    g, at = g.topk(capacity)\n    t = t[at]\ng = g[:, None]",
    "slice": "at = order[starts[e] : starts[e] + counts[e]]\nt, g = at // K, flat[at, None]",
    "narrow": "at = torch.narrow(order, 0, starts[e], counts[e])\nt, g = at // K, flat[at, None]",
}
SKIPS = {
    "none": (),
    "continue": ("if t.numel() == 0:\n    continue",),
    "if": ("if len(t) > 0:",),
    "twice": ("if not (index == e).any():\n    continue", "if t.shape[0] == 0:\n    continue"),
}
WEIGHTS = {
    "modules": "y = moe.mlps[e](x[t])",
    "stacked": "y = F.silu(x[t] @ moe.w1[e]) @ moe.w2[e]",
    "einsum": "h = F.silu(torch.einsum('nd,df->nf', x[t], moe.w1[e]))\ny = torch.einsum('nf, fd -> nd', h, moe.w2[e])",
}
SUMS = {
    "index_add_": "out.index_add_(0, t, y * g)",
    "in place": "out[t] += y * g",
    "index_add": "out = out.index_add(0, t, y * g)",
}
COUNTS = {
    "nothing": "",
    "usage": "moe.usage[e] += t.numel()",
    "copied": "moe.usage.copy_(moe.usage + 1)",
    "mass": "moe.mass.add_(g.detach().sum())",
}


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("usage", torch.zeros(E))
        self.register_buffer("mass", torch.zeros(()))
        for mlp in self.mlps:
            mlp.register_buffer("seen", torch.zeros(()))


def written(rows, skip, weights, added, counted):
    *first, last = SKIPS[skip] or ("",)
    return layer_of([*first, ROWS[rows], last], [WEIGHTS[weights], SUMS[added], COUNTS[counted]], skip)


def layer_of(body, behind, skip="", result="out"):
    indent = "    " if skip == "if" else ""
    lines = [line for part in body for line in part.splitlines()]
    lines += [indent + line for part in behind for line in part.splitlines()]
    text = BEGIN + "".join(f"        {line}\n" for line in lines) + f"    return {result}\n"
    namespace = {"torch": torch, "F": torch.nn.functional, "E": E, "K": K, "D": D}
    exec(compile(text, f"<layer {hash(text) & 0xFFFFFF:x}>", "exec"), namespace)
    return namespace["layer"], text


def lowered(*form):
    layer, text = written(*form)
    _, regions = regions_of(layer, text=text, layer=Counting)
    return bool(regions) and all(region.lowered for region in regions)


FORMS = [
    form
    for form in itertools.product(ROWS, SKIPS, WEIGHTS, SUMS, COUNTS)
    if form[:2] != ("narrow", "twice")  # (a graph break: what it may fail for is not known behind the first skip)
]


@pytest.mark.share(16)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_is_one_operator(form):
    assert lowered(*form)


def no_branch(*_):
    raise written_out.Open


OFF = {  # a layer that needs it, and how it is switched off
    "iterations as branches": ("any", "continue", "stacked", (written_out.Written, "branch", no_branch)),
    "branches that compute": ("best if more", "none", "modules", (blocks, "computes", aliasing.only_computes)),
    "rows by a branch": ("best if more", "twice", "modules", (Opening, "find", lambda *_: False)),
    "einsum": ("where", "none", "einsum", (operators, "product_of", lambda *_: None)),
}


@pytest.mark.parametrize("off", OFF)
def test_without_its_mechanism_it_stays_a_loop(off, monkeypatch):
    *form, patch = OFF[off]
    monkeypatch.setattr(*patch)
    assert not lowered(*form, "in place", "nothing")


def test_what_counts_lies_apart(monkeypatch):
    """As guards say; where nobody said so, a write between the experts may be into what they read."""
    monkeypatch.setattr(aliasing.Storage, "is_known", aliasing.Storage.is_fresh)
    assert not lowered("slice", "none", "modules", "in place", "mass")


WRITTEN = {  # before the expert: what decides whether it runs; behind it: what decides whether the iteration goes on
    "counted": ("moe.mlps[e].seen.add_(1)", "moe.mlps[e].seen == 1"),
    "tokens": ("moe.mlps[e].seen += len(t)", "moe.mlps[e].seen > 9"),
    "a weight": ("moe.mass.add_(1)", "g.sum() < 0.7"),
    "rows": ("moe.mass.add_(1)", "len(t) % 2 == 0"),
}


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.parametrize("rows", ["where", "any", "best if more"])
def test_what_a_branch_writes_decides_in_it(rows, what, where):
    """Each expert has a buffer of its own, so that no other one's rows depend on it."""
    write, asked = WRITTEN[what]
    expert, ends = (WEIGHTS["modules"], SUMS["in place"]), f"{write}\nif {asked}:\n    continue"
    behind = (ends, *expert) if where == "before" else (*expert, ends, "moe.usage[e] += 1")
    layer, text = layer_of([ROWS[rows], *SKIPS["continue"]], behind, result="out + weight.sum()")
    regions_of(layer, text=text, layer=Counting)
