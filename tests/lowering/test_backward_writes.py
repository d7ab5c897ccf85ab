"""``backward`` writes into the gradients that a graph was given, and into nothing else."""

from __future__ import annotations

import torch
from torch import fx

from moebius.lowering import Storage


def test_backward_is_a_writer_of_gradients():
    graph = fx.Graph()
    x, grad, other = graph.placeholder("x"), graph.placeholder("grad"), graph.placeholder("other")
    for node, source in ((x, "L['p']"), (grad, "L['p'].grad"), (other, "L['x'].grades")):
        node.meta.update(source=source, val=torch.ones(2))
    view = graph.call_method("view", (grad, 2))
    loss = graph.call_method("sum", (x,))
    backward = graph.call_method("backward", (loss,))
    after = graph.call_method("sum", (view,))
    graph.output(after)
    storage = Storage(graph)
    assert storage.writers == {backward: [grad]}
    assert storage.writer_between(view, after) is backward
    assert storage.writer_between(x, after) is None
    assert storage.writer_between(other, after) is None


def test_the_index_of_writers_finds_what_asking_each_writer_does():
    def program(x, y, z):
        part, other = x[1:], y.view(-1)
        part.add_(1)
        x.set_(y)  # from here on, what shared with the one may share with the other
        other.mul_(2)
        made = torch.relu(z)
        made.add_(part)
        z.data.copy_(made)
        return x.view(-1), made[0], other

    storage = Storage(fx.symbolic_trace(program).graph)
    nodes = [node for node in storage.graph.nodes if node.op != "output"]

    def scanned(node, after, end):
        within = [w for w in storage.writers if (after is None or after < w) and (end is None or w < end)]
        return [w for w in within if any(storage.share(node, target) for target in storage.writers[w])]

    found = 0
    for node in nodes:
        for after, end in ((None, None), (nodes[5], None), (None, nodes[8]), (nodes[3], nodes[9])):
            writers = list(storage.writers_of([node], after, end))
            assert writers == scanned(node, after, end), node
            found += len(writers)
    assert found > len(nodes)
    gone = next(iter(storage.writers))
    storage.forget(gone)
    assert not any(gone in storage.writers_of([node]) for node in nodes)
