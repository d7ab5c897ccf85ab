"""Values that a graph writes into after others were computed of them (``h.data.mul_(2)``): backward in plain Python
reads what was put there, or raises an error. That must stay so: what was computed of such a value still is."""

from __future__ import annotations

from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.operators import read_call
from moebius.lowering.step import is_backward
from moebius.lowering.step.given_out import SHAPES, is_differentiable

WRITTEN = "a value that the loop's iterations compute is written into before backward"
Readers = dict[tuple[str, str], frozenset[str]]


def readers_before_writes(gm: fx.GraphModule) -> Readers:
    """By (value, write), by name: what was computed of the value by then. Views are the value itself."""
    storage = Storage(gm.graph)
    found: Readers = {}
    for writer, targets in storage.writers.items():
        if is_backward(writer):
            continue
        for value in {root for target in targets for root in storage.roots[target] if is_differentiable(root)}:
            users = {user for node in storage.family(value) for user in node.users if user < writer}
            readers = {user.name for user in users if is_reader(user, storage)}
            if readers:
                found[value.name, writer.name] = frozenset(readers)
    return found


def is_reader(user: fx.Node, storage: Storage) -> bool:
    """Whether it has a backward that may read what it was computed of: not of a view, nor where only a size is read."""
    call, made = read_call(user), user.meta.get("val")
    made = made if isinstance(made, tuple | list) else (made,)
    if user in storage.writers or (call is not None and (call.op.alias or call.name in SHAPES)):
        return False
    return any(getattr(value, "requires_grad", False) for value in made)


def is_unread(before: Readers, gm: fx.GraphModule) -> bool:
    """Whether something that was computed of a value is not any more, and the write is still there."""
    if not before:
        return False
    names = {node.name for node in gm.graph.nodes}
    return any({value, write} <= names and not readers <= names for (value, write), readers in before.items())
