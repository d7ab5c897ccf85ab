"""Equal layers with experts are lowered once, and the graph does what it did; layers that must not be are not."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebius import capture, explain
from moebius.api import captured_of
from moebius.lowering import aliasing, entry, equal_nodes, layers
from moebius.lowering.experts import blocks, rewrite
from moebius.lowering.layers import are_fresh, writes_outside
from moebius.lowering.operators import read_call
from moebius.lowering.repeats import find_layers

LAYERS = 6


class Experts(nn.Module):
    """Four gated MLPs, two for each token; a row of ``rows`` for the layer, which can be missing."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(8)
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.3), nn.Parameter(torch.randn(4, 8, 6) * 0.3)

    def forward(self, x, row):
        h = self.norm(x.clone())
        weights, chosen = torch.topk(F.softmax(self.router(h), -1), 2)
        out = torch.zeros_like(h)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert[0]])
            gate, up = F.linear(h[token], self.gate_up[expert[0]]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert[0]])
            if self.kind == "not proven":
                y = y.cumsum(0)
            out.index_add_(0, token, y * weights[token, slot, None])
        if self.kind == "in place":
            return x.add_(out[row])
        if self.kind == "view":
            return x + out[row], x[:]
        return x + out[row]


class Model(nn.Module):
    def __init__(self, kind="", layers=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Experts(kind) for _ in range(layers))

    def forward(self, x, rows):
        x = self.embed(x)
        for layer, row in zip(self.layers, rows, strict=True):
            x = layer(x, row)
            if isinstance(x, tuple):
                x = x[0] + x[1] * 0.5
        return x.tanh()


def run(model, x, rows):
    return model(x, rows)


X = torch.linspace(-1, 1, 40).reshape(5, 8)
ROWS = [torch.arange(4, -1, -1) for _ in range(LAYERS)]


def outcome(function, model, x, rows):
    model.zero_grad()
    try:
        result = function(model, x, rows)
    except IndexError as error:
        return str(error), None
    result.square().sum().backward()
    return result, [p.grad for p in model.parameters()]


def check(function, model, x=X, rows=ROWS):
    found, want = outcome(function, model, x, rows), outcome(run, model, x, rows)
    if isinstance(want[0], str):
        assert found == want
    else:
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)  # another order of additions


def lowered_of(captured):
    return [segment.lowered for segment in captured_of(captured).segments]


def test_one_layer_is_proven_for_all(monkeypatch):
    proofs = []
    monkeypatch.setattr(rewrite, "prove", lambda *a, prove=rewrite.prove: proofs.append(a) or prove(*a))
    model, captured = Model(), capture(run)
    for _ in range(2):
        check(captured, model)
    (lowered,) = lowered_of(captured)
    assert 1 <= len(proofs) <= 2  # of a layer, and of one that stands beside the repeated ones
    assert [r.lowered for r in lowered.regions] == [True] * LAYERS and len(lowered.repeats.bodies) == 1


def test_the_whole_graph_is_that_of_all_layers_lowered_one_by_one(monkeypatch):
    def nodes(captured):
        (lowered,) = lowered_of(captured)
        kept = [n for n in lowered.gm.graph.nodes if (call := read_call(n)) is None or call.name != "set_grad_enabled"]
        return [(n.op, str(n.target), n.meta.get("number"), n.meta.get("where"), n.meta.get("stack")) for n in kept]

    model, together, apart = Model(), capture(run), capture(run)
    check(together, model)
    monkeypatch.setattr(entry, "lower_layers", lambda *args: None)
    check(apart, model)
    assert nodes(together) == nodes(apart)
    assert lowered_of(together)[0].regions == lowered_of(apart)[0].regions


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_an_operator_that_fails_in_a_layer(bad):
    model, rows, captured = Model(), [*ROWS], capture(run)
    rows[bad] = torch.tensor([4, 9, 2, 1, 0])
    for given in (ROWS, rows, ROWS, rows):
        check(captured, model, rows=given)
    assert lowered_of(captured)[0].repeats is not None


@pytest.mark.parametrize("kind", ["in place", "not proven", "view"])
def test_layers_whose_surroundings_matter(kind):
    """A layer that writes into what it was given, one whose proof fails, one with a view of its argument as result."""
    model, captured = Model(kind), capture(run)
    for n in range(3):
        check(captured, model, x=X + n)
    (lowered,) = lowered_of(captured)
    assert all(r.lowered == (kind != "not proven") for r in lowered.regions) and len(lowered.regions) == LAYERS
    assert lowered.made is not None


def test_sizes_that_vary_and_gradients_that_somebody_sees():
    model, captured = Model(), capture(run)
    for tokens in (5, 7, 6):
        rows = [torch.arange(tokens) for _ in range(LAYERS)]
        check(captured, model, torch.linspace(-1, 1, 8 * tokens).reshape(tokens, 8), rows)

    def watched(model, x, rows):
        y = model.embed(x)
        for layer, row in zip(model.layers, rows, strict=True):
            y = layer(y, row)
            y.register_hook(lambda grad: grad * 2)
        return y

    captured = capture(watched)
    found, want = outcome(captured, model, X, ROWS), outcome(watched, model, X, ROWS)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)  # another order of additions


def test_the_report_has_a_region_for_each_layer():
    report = explain(run)(Model(), X, ROWS)
    assert [(r.lowered, r.num_experts) for r in report.expert_regions] == [(True, 4)] * LAYERS


class Cached(nn.Module):
    """Layers that each make a tensor on a device, and keep something in a list, as a key-value cache does."""

    def __init__(self, layers):
        super().__init__()
        self.model = Model(layers=layers)

    def forward(self, x, kept):
        x = self.model.embed(x)
        for layer, row in zip(self.model.layers, itertools.cycle(ROWS)):
            keys = torch.tensor([], dtype=x.dtype, device=x.device)
            kept.append(torch.cat([keys, x.flatten()]))
            x = layer(x, row)
        return x.tanh()


def training(model, optimizer, write=None):
    def step(x):
        optimizer.zero_grad()
        loss = (model(x, kept := []) + kept[-1].view_as(x) * 0.1).square().mean()
        if write is not None:
            write(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def proofs_of_a_step(monkeypatch, count):
    """How many loops are proven for a step that trains, keeps something of each layer, and has an optimizer."""
    models, proofs = [Cached(count), Cached(count)], []
    plain, ours = (training(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) for model in models)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "prove", lambda *a, prove=rewrite.prove: proofs.append(a) or prove(*a))
        captured = capture(ours)
        for _ in range(3):
            torch.testing.assert_close(captured(X), plain(X), rtol=1e-4, atol=1e-5)
    (lowered,) = lowered_of(captured)
    assert [r.lowered for r in lowered.regions] == [True] * count
    return len(proofs)


def test_what_a_training_step_costs_does_not_grow_with_its_layers(monkeypatch):
    assert proofs_of_a_step(monkeypatch, 4) == proofs_of_a_step(monkeypatch, 16) <= 2


@pytest.mark.parametrize("off", ["layers", "constants", "no other layers"])
def test_it_grows_without(off, monkeypatch):
    if off == "layers":
        monkeypatch.setattr(entry, "lower_layers", lambda *args: None)
    elif off == "constants":
        monkeypatch.setattr(equal_nodes, "BY_TEXT", equal_nodes.BY_TEXT - {torch.device})
    else:  # a graph in which something else comes again and again has no layers with experts
        def alone(nodes):
            return found if len(found := list(find_layers(nodes))) < 2 else []

        monkeypatch.setattr(layers, "find_layers", alone)
    assert proofs_of_a_step(monkeypatch, 4) < proofs_of_a_step(monkeypatch, 8)


@pytest.mark.parametrize("kept", [True, False])
def test_who_writes_where_is_asked_of_the_whole_graph_twice(kept, monkeypatch):
    """Of what was captured, and of what an optimizer's chains are joined in; once more where the first is not kept."""
    sizes, init = [], aliasing.Storage.__init__
    monkeypatch.setattr(aliasing.Storage, "__init__", lambda s, graph: sizes.append(len(graph.nodes)) or init(s, graph))
    if not kept:
        monkeypatch.setattr(layers, "remembering", contextlib.nullcontext)
    proofs_of_a_step(monkeypatch, 8)
    assert sum(size > max(sizes) / 2 for size in sizes) == (2 if kept else 3), sizes


def test_what_gradients_reach_is_asked_where_products_of_one_line_may_be_experts(monkeypatch):
    graphs, reaching = [], blocks.reaching_gradients
    monkeypatch.setattr(blocks, "reaching_gradients", lambda graph: graphs.append(graph) or reaching(graph))
    proofs_of_a_step(monkeypatch, 4)
    assert not graphs


@pytest.mark.parametrize(("name", "seen"), [("down", True), ("gate_up", True), ("down", False)])
def test_weights_that_change_before_backward(name, seen, monkeypatch):
    """What a layer keeps for backward is written into: the layer's graph alone does not show it."""
    if not seen:
        monkeypatch.setattr(layers, "changes_what_layers_keep", lambda outer: False)

    def write(model):
        for layer in model.model.layers:
            getattr(layer, name).data.mul_(3.0)

    models = [Cached(LAYERS), Cached(LAYERS)]
    plain, ours = (training(model, torch.optim.SGD(model.parameters(), lr=0.1), write) for model in models)
    captured = capture(ours)
    plain(X)
    if not seen:
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            captured(X)
        return
    captured(X)
    for found, want in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(found.grad, want.grad, rtol=1e-4, atol=1e-5)


def test_what_is_known_of_a_layers_graph_from_outside():
    def of(function):
        return torch.fx.symbolic_trace(function).graph

    assert are_fresh(of(lambda x, y: (x + y, torch.relu(x))))
    assert not are_fresh(of(lambda x, y: (x + y, x.view(-1))))
    assert not are_fresh(of(lambda x, y: [z := x + y, z.view(-1)]))
    assert not writes_outside(of(lambda x, y: ((x + y).add_(1),)))
    assert writes_outside(of(lambda x, y: (x.view(-1).add_(1),)))
