"""Values that a graph writes into after others were computed of them (``h.data.mul_(2)``): backward in plain Python
reads what was put there, or raises an error. That must stay so: what was computed of such a value still is.

Who is given the memory of such a value by a graph (``h.detach()``) may write there, too, before it runs backward."""

from __future__ import annotations

from torch import fx

from moebius.lowering.aliasing import Storage, storage_of
from moebius.lowering.operators import read_call
from moebius.lowering.step import is_backward
from moebius.lowering.step.given_out import SHAPES, is_differentiable

WRITTEN = "a value that the loop's iterations compute is written into before backward"
Readers = dict[tuple[str, str], frozenset[str]]


def readers_before_writes(gm: fx.GraphModule) -> Readers:
    """By (value, write), by name: what was computed of the value by then. Views are the value itself."""
    storage = storage_of(gm.graph)
    found: Readers = {}
    for writer, targets in [*storage.writers.items(), *given_out(gm.graph, storage)]:
        if is_backward(writer):
            continue
        for value in {root for target in targets for root in storage.roots[target] if is_differentiable(root)}:
            users = {user for node in storage.family(value) for user in node.users if user < writer}
            readers = {user.name for user in users if is_reader(user, storage)}
            if readers:
                found[value.name, writer.name] = frozenset(readers)
    return found


def given_out(graph: fx.Graph, storage: Storage) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The output, as what may write into what it gives out; nothing where backward has run by then."""
    (output,) = graph.find_nodes(op="output")
    return [] if storage.backwards else [(output, output.all_input_nodes)]


def is_reader(user: fx.Node, storage: Storage) -> bool:
    """Whether it has a backward that may read what it was computed of: not of a view, nor where only a size is read."""
    call, made = read_call(user), user.meta.get("val")
    made = made if isinstance(made, tuple | list) else (made,)
    if user in storage.writers or (call is not None and (call.op.alias or call.name in SHAPES)):
        return False
    return any(getattr(value, "requires_grad", False) for value in made)


def is_unread(before: Readers, gm: fx.GraphModule) -> bool:
    """Whether something that was computed of a value is not any more, and the value is still there. (The write may be
    out of place by now: nobody was left who reads the value.) One that is given out may have a reader in their place,
    an operator that keeps it."""
    if not before:
        return False
    (output,) = gm.graph.find_nodes(op="output")
    named = {node.name: node for node in gm.graph.nodes}
    lost = [one for one, readers in before.items() if one[0] in named and not readers <= named.keys()]
    if not lost or any(write != output.name for _, write in lost):
        return bool(lost)
    storage = Storage(gm.graph)
    users = {one: {user for node in storage.family(named[one[0]]) for user in node.users} for one in lost}
    return any(not any(is_reader(user, storage) for user in users[one] if user.name not in before[one]) for one in lost)
