"""Layers over a list of modules, put together of the ways in which people write their parts: each gives eager's output
and gradients, in one graph, and is lowered."""

from __future__ import annotations

import itertools
import linecache
import textwrap

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import E, K

# which experts a token goes to: w, index [T, K]
ROUTES = {
    "topk": "w, index = moe.gate(x).softmax(-1).topk(K, -1)",
    "int32": "w, index = moe.gate(x).softmax(-1).topk(K, -1)\nindex = index.to(torch.int32)",
    "argsort": "p = moe.gate(x).softmax(-1)\nindex = p.argsort(-1, descending=True)[:, :K]\nw = p.gather(1, index)",
    "sort": "w, index = moe.gate(x).softmax(-1).sort(-1, descending=True)\nw, index = w[:, :K], index[:, :K]",
    "argmax": "p = moe.gate(x).softmax(-1)\nindex = p.argmax(-1, keepdim=True)\nw = p.gather(1, index)",
    "max": "w, index = moe.gate(x).max(-1, keepdim=True)",
    "two argmaxes": "p = moe.gate(x).softmax(-1)\none = p.argmax(-1)\ntwo = p.masked_fill(F.one_hot(one, E).bool(), 0)"
    ".argmax(-1)\nindex = torch.stack([one, two], -1)\nw = p.gather(1, index)",
    "shared first": "w, one = moe.gate(x)[:, 1:].softmax(-1).topk(1, -1)\nw = torch.cat([torch.ones_like(w), w], -1)\n"
    "index = torch.cat([torch.zeros_like(one), one + 1], -1).clamp(0, E - 1)",
}
# the iterations: lines before, head, lines at the start
LOOPS = {
    "range": ("", "for e in range(E):", ""),
    "enumerate": ("", "for e, expert in enumerate(moe.experts):", ""),
    "reversed": ("", "for e in reversed(range(E)):", ""),
    "while": ("e = 0", "while e < E:", "e += 1"),
    "unique": ("", "for e in index.unique():", ""),
    "items of unique": ("", "for e in torch.unique(index):", "e = e.item()"),
    "list of unique": ("", "for e in torch.unique(index).tolist():", ""),
    "set": ("", "for e in sorted(set(index.flatten().tolist())):", ""),
    "hits": ("hit = F.one_hot(index.long(), E).sum((0, 1)).nonzero().flatten()", "for e in hit:", ""),
    "bins": ("hit = (torch.bincount(index.flatten(), minlength=E) > 0).nonzero(as_tuple=True)[0].tolist()",
             "for e in hit:", ""),
}  # fmt: skip
GATES = "gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index.long(), w)"
# which rows an expert gets, and their weights: lines before the loop, lines in it
FINDS = {
    "where": ("", "t, k = torch.where(index == e)\ng = w[t, k]"),
    "columns": ("", "t, k = (index == e).nonzero().T\ng = w[t, k]"),
    "one hot": ("mask = F.one_hot(index.long(), E).permute(2, 1, 0)", "k, t = torch.where(mask[e])\ng = w[t, k]"),
    "any": ("", "t = (index == e).any(-1).nonzero().squeeze(1)\ng = (w * (index == e)).sum(-1)[t]"),
    "not chosen": ("", "no = index != e\nt = (~no).any(-1).nonzero()[:, 0]\ng = w.masked_fill(no, 0.0).sum(1)[t]"),
    "flat": ("", "at = torch.where(index.flatten() == e)[0]\nt = at // index.shape[1]\ng = w.flatten()[at]"),
    "gates": (GATES, "t = (gates[:, e] > 0).nonzero().squeeze(1)\ng = gates[t, e]"),
    "turned gates": (GATES, "gate = gates.t()[e]\nt = gate.nonzero(as_tuple=True)[0]\ng = gate[t]"),
}
TWICE = ("two argmaxes", "shared first")  # nothing says that they differ
ONCE = ("any", "not chosen")  # a token that has an expert twice is given it once


def indented(text):
    return textwrap.indent(text, "    ")


def source(route, loop, find):
    before, head, start = LOOPS[loop]
    outside, inside = FINDS[find]
    expert = "expert" if loop == "enumerate" else "moe.experts[e]"
    body = "\n".join([inside, f"out.index_add_(0, t, {expert}(x[t]) * g[:, None])", start if loop == "while" else ""])
    body = body if loop == "while" else f"{start}\n{body}"
    return f"""\
def layer(x, moe):
{indented(ROUTES[route])}
    out = torch.zeros_like(x)
{indented(outside)}
{indented(before)}
    {head}
{textwrap.indent(body, "        ")}
    return out
"""


def layer_of(text):
    name = f"<layer {hash(text) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace = {"torch": torch, "F": torch.nn.functional, "E": E, "K": K}
    exec(compile(text, name, "exec"), namespace)
    return namespace["layer"]


@pytest.mark.share(13)
@pytest.mark.parametrize(("route", "loop", "find"), [*itertools.product(ROUTES, LOOPS, FINDS)])
def test_layer(route, loop, find):
    text = source(route, loop, find)
    graphs, lowered = compare(layer_of(text), text=text)
    assert graphs == 1
    assert lowered or (route in TWICE and find in ONCE), text


WRITES = {
    "into the index": "index[:, 0] = two",
    "into a part": "index[:, 0].copy_(two)",
    "into what was copied": "best[:, 0] = two\nindex = best.clone()",
    "before it was cast": "best[:, 0] = two\nindex = best.int()",
    "before it was put together": "best[:, 0] = two\nindex = torch.cat([best[:, :1], best[:, 1:]], -1)",
    "between copies": "index = best.clone()\nindex[:, 0] = two\nindex = index.clone()",
}


CHANGED = "two = best[:, 1] - (x[:, 0] > 1).long()"


@pytest.mark.share(5)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("loop", ["range", "list of unique"])
def test_what_is_written_is_not_what_was_chosen(write, loop):
    """Experts of a token may then be the same ones, or none that there are: -1 is the last of a list."""
    route = f"w, best = moe.gate(x).softmax(-1).topk(K, -1)\nindex = best = best.clone()\n{CHANGED}\n{WRITES[write]}"
    text = source("topk", loop, "any").replace(indented(ROUTES["topk"]), indented(route))
    compare(layer_of(text), text=text)


COUNTS = ["counts[e] += t.numel()", "counts[e] = 0.9 * counts[e] + t.numel()", "loss = loss + g.sum()"]


@pytest.mark.parametrize("count", COUNTS)
def test_what_counts_is_no_layer(count):
    """Statistics kept between the experts are none of their own, and the experts are lowered beside them."""
    text = source("topk", "enumerate", "where")
    text = text.replace("    out =", "    counts, loss = x.new_zeros(E), x.new_zeros(())\n    out =")
    text = text.replace("        out.index_add_", f"        {count}\n        out.index_add_")
    text = text.replace("return out", "return out * (1 + loss + counts.sum())")
    assert compare(layer_of(text), text=text) == (1, True)


ENDS = ["out.view(2, -1)", "out.view_as(x).mul_(2)", "(out.t() * out.add_(1).t()).t()"]


@pytest.mark.parametrize("first", ["0", "torch.zeros_like(x)", "x * 1.0"])
@pytest.mark.parametrize("end", ENDS)
def test_who_views_the_finished_sum_sees_all_of_it(first, end):
    text = f"""\
def layer(x, moe):
    w, index = moe.gate(x).softmax(-1).topk(K, -1)
    {GATES}
    out = {first}
    for e, expert in enumerate(moe.experts):
        out += gates[:, e : e + 1] * expert(x)
    return {end}
"""
    assert compare(layer_of(text), text=text) == (1, True)


def test_a_list_of_modules_is_not_what_blocks():
    """It is unrolled, as every such list; what is not understood is said of the iterations."""
    text = source("topk", "range", "where").replace("    out =", "    loss = x.new_zeros(())\n    out =")
    skip = "        if not len(t):\n            continue\n"
    text = text.replace("        out.index_add_", f"{skip}        out.index_add_")
    text = text.replace("    return out", "        loss = loss + g.sum()\n    return out * (1 + loss)")
    _, regions = regions_of(layer_of(text), text=text)
    assert regions and not any("text" in (region.refusal or "") for region in regions)
