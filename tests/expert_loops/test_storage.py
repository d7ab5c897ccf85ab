"""Who writes where, and what shares memory, of a graph that passes change: what is brought up to date says what a walk
would say."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_spellings import MODULES
from spellings import SPELLINGS
from table import SEEDS, Runner
from torch import fx

from moebius import capture
from moebius.lowering.aliasing import Storage
from moebius.lowering.step import gradient_of, set_data, set_gradient

EVERY = {**SPELLINGS, **MODULES}


def said_of(storage: Storage) -> dict[str, Any]:
    """All that a Storage answers from, without the order in which it heard of it."""
    into = {target: Counter(writers) for target, writers in storage.writers_into.items() if writers}
    return {
        "roots": storage.roots, "sharing": {root: set(nodes) for root, nodes in storage.sharing.items() if nodes},
        "writers": storage.writers, "into": into, "backwards": set(storage.backwards), "memory": storage.memory,
        "gradients": storage.gradients,
    }  # fmt: skip


def make(graph: fx.Graph, draw: random.Random, nodes: list[fx.Node]) -> fx.Node:
    """Any kind of node: a view, something new, a write, what no table knows, what puts memory elsewhere."""
    a, b = draw.choice(nodes), draw.choice(nodes)
    kind = draw.choice(("view", "view", "new", "new", "write", "write", "unknown", "pick", "data", "read", "put"))
    if kind == "view":
        return graph.call_method("view", (a, -1))
    if kind == "new":
        return graph.call_function(torch.mul, (a, b))
    if kind == "write":
        return graph.call_method("add_", (a, b))
    if kind == "unknown":
        return graph.call_function(print, (a, b))
    if kind == "pick":
        return graph.call_function(torch.split, (a, 2))
    if draw.random() < 0.8:  # (these are rare in graphs)
        return graph.call_function(torch.relu, (a,))
    if kind == "data":
        return graph.call_function(set_data, (a, b))
    return graph.call_function(gradient_of if kind == "read" else set_gradient, (a,) if kind == "read" else (a, b))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_changes(seed):
    draw = random.Random(seed)
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(3)]
    nodes[0].meta["memory"] = nodes[1].meta["memory"] = 7
    for _ in range(12):
        nodes.append(make(graph, draw, nodes))
    output = graph.output((nodes[-1],))
    storage = Storage(graph)
    for _ in range(25):
        for _ in range(draw.randint(1, 4)):
            change, place = draw.choice(("add", "add", "erase", "replace", "argument")), draw.randrange(3, len(nodes))
            node = nodes[place]
            if change == "add":
                with graph.inserting_before(node):
                    nodes.insert(place, make(graph, draw, nodes[:place]))
            elif change == "replace":
                node.replace_all_uses_with(draw.choice(nodes[:place]))
            elif change == "argument":
                node.args = (draw.choice(nodes[:place]), *node.args[1:])
            elif not node.users and len(nodes) > 8:
                graph.erase_node(node)
                nodes.remove(node)
        output.args = ((nodes[-1],),)
        if draw.random() < 0.5:  # what a pass says of its own changes
            target = draw.choice(nodes)
            storage.forget(target) if draw.random() < 0.5 else storage.replace(nodes[0], target)
        storage.catch_up()
        assert said_of(storage) == said_of(Storage(graph))


def test_what_others_said_before():
    """A node is by now what was said of it; what is made of it was read before that."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = graph.call_function(torch.mul, (x, y))
    view = graph.call_method("view", (made, -1))
    graph.output((view,))
    storage = Storage(graph)
    storage.replace(x, made)
    made.target, made.args = torch.reshape, (x, (-1,))
    storage.catch_up()
    assert said_of(storage) == said_of(Storage(graph)) and storage.roots[view] == {x}


@pytest.mark.share(12)
@pytest.mark.parametrize("name", EVERY)
def test_as_passes_change_it(name, monkeypatch):
    agree = comparing(monkeypatch)
    assert not Runner(name).call(SEEDS[0])
    assert all(agree)


def test_layers_of_products(monkeypatch):
    """Each but the last layer asks of a graph that has changed."""
    agree, weights = comparing(monkeypatch), [torch.randn(4, 8, 8, requires_grad=True) for _ in range(6)]

    @capture
    def step(x, scores):
        chosen = scores.topk(1).indices.flatten()
        order = chosen.argsort()
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = F.grouped_mm(torch.relu(F.grouped_mm(x[order], up, offs=ends)), down, offs=ends)
            x = x + torch.zeros_like(x).index_add(0, order, y)
        return x

    step(torch.randn(8, 8), torch.randn(8, 4))
    assert len(agree) > 1 and all(agree)


def comparing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that something is brought up to date from now on: whether it says what a walk would say."""
    catch_up, agree = Storage.catch_up, list[bool]()

    def compared(storage: Storage) -> None:
        catch_up(storage)
        agree.append(said_of(storage) == said_of(Storage(storage.graph)))

    monkeypatch.setattr(Storage, "catch_up", compared)
    return agree
