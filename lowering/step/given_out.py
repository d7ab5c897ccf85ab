"""Values that a graph gives out beside what is computed of them: the gradient that a caller asks of one, or the hook
that the program has put on it, is on the way of backward only while the other outputs are still computed of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.operators import read_call
from moebius.lowering.values import results_of

SHAPES = frozenset({"zeros", "ones", "full"})  # of the size of their argument
FIRST_ALONE = frozenset({"blocks_apart", "type_as"})
GIVEN = "a value that the loop's iterations compute is given out of the graph, where its gradient may be asked for"
Ways = dict[int, int]


def ways_out(gm: fx.GraphModule) -> Ways:
    """By the place of each output that may be differentiated: the other such outputs that it is on the way to, as bits.

    Nothing that is written in between is forgotten: what is read of a storage later goes on with what was put there.
    """
    given = results_of(gm.graph)
    places = [i for i, value in enumerate(given) if is_differentiable(value)]
    if len(places) < 2:
        return {}
    found = reached(gm.graph, {i: given[i] for i in places})
    return {i: found[given[i]] & ~(1 << i) for i in places}


def is_lost(before: Ways, gm: fx.GraphModule) -> bool:
    """Whether an output is no longer on the way to another one that it was on the way to."""
    if not any(before.values()):
        return False
    given = results_of(gm.graph)
    found = reached(gm.graph, {i: given[i] for i in before})
    return any(ways & ~found[given[i]] for i, ways in before.items())


def is_differentiable(value: object) -> bool:
    """A result that requires gradients; an input of the graph is there whatever becomes of it."""
    if not isinstance(value, fx.Node) or value.op in ("placeholder", "get_attr"):
        return False
    return getattr(value.meta.get("val"), "requires_grad", False)


def reached(graph: fx.Graph, outputs: dict[int, fx.Node]) -> dict[fx.Node, int]:
    """For each node the outputs that are computed of it, as bits: one walk from the end."""
    storage = Storage(graph)
    of_node: dict[fx.Node, int] = defaultdict(int)
    of_storage: dict[fx.Node, int] = defaultdict(int)

    def add(node: fx.Node, bits: int) -> None:
        of_node[node] |= bits
        for root in storage.roots[node]:
            of_storage[root] |= bits

    for place, node in outputs.items():
        add(node, 1 << place)
    for node in reversed(graph.nodes):
        bits, written = of_node[node], storage.writers.get(node, ())
        for target in written:
            for root in storage.roots[target]:
                bits |= of_storage[root]
        if bits and node.op != "output":
            for source in ways_back(node, written):
                add(source, bits)
    return of_node


def ways_back(node: fx.Node, written: Iterable[fx.Node]) -> list[fx.Node]:
    """The arguments that a gradient of the node may go on to: none of which only the size or the dtype is read.

    written: what it writes into (a loop or branch that adds in place gives nothing, or only a number besides)."""
    values = [value for made in (node, *written) if (value := made.meta.get("val")) is not None]
    if values and not any(map(may_have_gradient, values)):
        return []
    call = read_call(node)
    if call is None:
        return node.all_input_nodes
    if call.name in FIRST_ALONE:
        return [source for source in node.args[:1] if isinstance(source, fx.Node)] or node.all_input_nodes
    return [] if call.name in SHAPES else node.all_input_nodes


def may_have_gradient(value: object) -> bool:
    """Whether there is a number in it that is not whole; not so of a size, or of positions."""
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    if isinstance(value, tuple | list):
        return any(map(may_have_gradient, value))
    return not isinstance(value, int | torch.SymInt | torch.SymBool | None)
