"""Layers as functions (layers_as_functions.py), trained a few steps beside eager, and what becomes of each."""

from __future__ import annotations

import itertools

import layers_as_functions_too  # noqa: F401 (adds to HELD)
import layers_by_other_hands  # noqa: F401
import pytest
import torch
from beside_eager import compare, regions_of
from layers_as_functions import HELD, Held
from table import SEEDS, tensors
from test_drawn_layers import layer_of
from test_structures import said_of

import moebius
from moebius import capture

NONE = 0  # rows of a batch without tokens


def trained(call, layer, seed, rows):
    """One step of training: what came out, and all that it changed; or the type of what it raised."""
    x = tensors(seed)[0].detach()[:rows].requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    try:
        out = call(x, layer)
        out.square().sum().backward()
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        return type(error)
    grads = [parameter.grad for parameter in layer.parameters()]
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return [out, x.grad, *grads, *layer.parameters(), *layer.buffers()]


@pytest.mark.share(8)
@pytest.mark.parametrize("name", HELD)
def test_layer(name):
    moebius.reset()
    function, outcome = HELD[name]
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(Held().double())
    captured, becomes = capture(function), set()
    for seed, rows in [*((seed, 10) for seed in SEEDS), (0, NONE)]:
        ours, plain = trained(captured, layers[0], seed, rows), trained(function, layers[1], seed, rows)
        if isinstance(ours, type) or isinstance(plain, type):
            assert ours is plain and rows == NONE
            continue
        for a, b in zip(ours, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        if rows != NONE:
            becomes.add(said_of(captured))
    assert becomes == {outcome}


# loops that run for experts with rows alone, and what such an iteration does beside its expert
RUNS = {
    "unique": ("for e in index.unique():", ""),
    "list of unique": ("for e in index.unique().tolist():", ""),
    "hits": ("for e in F.one_hot(index, E).sum((0, 1)).nonzero():", ""),
    "range": ("for e in range(E):", "if not len(t):\n            continue"),
    "enumerate": ("for e, _ in enumerate(moe.experts):", "if t.numel() == 0:\n            continue"),
}
DOES = {
    "append": "ys.append(y)\n        ts.append(t)",
    "extend": "ys.extend([y])\n        ts.extend((t,))",
    "in place": "ys += [y]\n        ts += [t]",
    "two of them": "ys += [y, y * 0.5]\n        ts += [t, t]",
}
JOINED = "torch.zeros_like(x).index_add(0, torch.cat(ts), torch.cat(ys))"
WRITES = {
    "a sum": "seen[t] += 1",
    "two sums": "seen.index_add_(0, t, y)\n        seen[t] += y",
    "a number": "loss = loss + y.pow(2).mean()",
    "both": "loss = torch.maximum(loss, y.abs().max())\n        seen[t] = seen[t] * 0.5 + y.detach()",
    "one element": "seen[e, 0] = y.sum()",
}


def text_of(run, does, result):
    head, skip = RUNS[run]
    expert = "moe.experts[int(e)]" if run in ("unique", "hits") else "moe.experts[e]"
    return f"""\
def layer(x, moe):
    w, index = moe.gate(x).softmax(-1).topk(K, -1)
    ts, ys, out, seen, loss = [], [], torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(())
    {head}
        t, k = torch.where(index == e)
        {skip}
        y = {expert}(x[t]) * w[t, k, None]
        {does}
    return {result}
"""


@pytest.mark.share(4)
@pytest.mark.parametrize(("run", "does"), [*itertools.product(RUNS, DOES)])
def test_pieces_are_joined(run, does):
    text = text_of(run, DOES[does], JOINED)
    assert compare(layer_of(text), text=text) == (1, True)


@pytest.mark.share(4)
@pytest.mark.parametrize(("run", "writes"), [*itertools.product(("range", "enumerate"), WRITES)])
def test_what_else_a_branch_does(run, writes):
    text = text_of(run, f"out.index_add_(0, t, y)\n        {WRITES[writes]}", "out + seen + loss")
    assert compare(layer_of(text), text=text) == (1, True)


def test_rows_that_a_branch_writes():
    """They are no expert's before it: that is said, with the line that writes."""
    text = text_of("range", "out.index_add_(0, t, y)", "out + seen").replace("x[t])", "seen[t])")
    text = text.replace("        y = ", "        seen[t] += x[t]\n        y = ")
    graphs, regions = regions_of(layer_of(text), text=text)
    assert graphs == 1 and not any(region.lowered or "index_add_" in region.refusal for region in regions)
    assert regions[0].refusal.startswith("equal iterations: setitem changes what the expert is computed of")
