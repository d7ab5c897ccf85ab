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
