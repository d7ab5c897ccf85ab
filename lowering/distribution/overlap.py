"""Exchanges of experts' rows beside products: a layer in chunks, each exchange begun early and waited for late."""
from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from moebius.kernels import experts
from moebius.lowering.aliasing import only_computes
from moebius.lowering.distribution.expert_parallel import (
    combine,
    dispatch,
    start_combine,
    start_dispatch,
    wait_combine,
    wait_dispatch,
)
from moebius.lowering.distribution.place import arguments_of, call_experts

PARTS = ("x_TD", "index_TK", "weight_TK")  # arguments of the operator that each chunk has of its own
DIGEST = 6  # the argument of a dispatch that says what backward will do
OURS = frozenset({operator.getitem, experts})  # beside what only computes, what a wait may come after


def write_chunks(gm: fx.GraphModule, chunks: int) -> None:
    """Each ``combine(experts(dispatch(x)))`` becomes a pipeline of chunks; see the Contract in lowering/overlap.py."""
    layers = gm.graph.find_nodes(op="call_function", target=dispatch)
    found = [(sent, parts) for sent in layers if (parts := parts_of(sent))]
    digest_again(gm, [wait_late(pipeline(sent, *parts, chunks)) for sent, parts in found])
    gm.recompile()


def fault(gm: fx.GraphModule) -> str | None:
    """Where a layer is no pipeline that ends: all dispatches are begun at once, every chunk is waited for, computed and
    sent home, in order, once, and nothing that could come before the wait for results stands behind it."""
    for sent in gm.graph.find_nodes(op="call_function", target=dispatch):
        if parts_of(sent):
            return f"{sent} is not in chunks"
    for sent in gm.graph.find_nodes(op="call_function", target=start_dispatch):
        order = {node: place for place, node in enumerate(gm.graph.nodes)}
        users = sorted(sent.users, key=order.__getitem__)
        chunks = range(sent.args[-1])
        steps = [(node.target, *node.args[1:2]) for node in users[:-1]]
        if steps != [(target, chunk) for chunk in chunks for target in (wait_dispatch, start_combine)]:
            return f"{sent} does not send its {len(chunks)} chunks there and back, one after the other"
        last = users[-1]
        if last.target is not wait_combine or list(last.args[1:]) != users[1:-1:2]:
            return f"{last} does not wait for all chunks of {sent}"
        if (other := next(independent_of(last), None)) is not None:
            return f"{last} waits before {other}, which does not need it"
    return None


def parts_of(sent: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The experts and the combine of a dispatch."""
    home = [user for item in sent.users for user in item.users if user.target is combine]
    local: Any = home[0].args[0] if home else None
    alone = isinstance(local, fx.Node) and local.target is experts and len(local.users) == 1
    return (local, home[0]) if alone else None


def pipeline(sent: fx.Node, local: fx.Node, home: fx.Node, chunks: int) -> fx.Node:
    """Write the nodes of a layer in chunks in the place of its three; the last of them."""
    graph = sent.graph
    items: dict[Any, fx.Node] = {item.args[1]: item for item in sent.users}
    bound = arguments_of(local)

    def emit(target: Any, args: tuple, like: fx.Node, value: bool = True) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = {key: held for key, held in like.meta.items() if value or key in ("where", "stack")}
        return made

    with graph.inserting_before(sent):
        begun = emit(start_dispatch, (*sent.args, chunks), sent, value=False)
    coming = []
    with graph.inserting_before(home):
        for chunk in range(chunks):
            arrived = emit(wait_dispatch, (begun, chunk), sent, value=False)
            own = {place: emit(operator.getitem, (arrived, place), item) for place, item in items.items() if place < 4}
            bound |= {name: own.get(place) for place, name in enumerate(PARTS)}
            made = call_experts(graph, bound)
            made.meta = dict(local.meta)
            coming.append(emit(start_combine, (begun, chunk, made, own[3]), sent, value=False))
        out = emit(wait_combine, (begun, *coming), home)
    home.replace_all_uses_with(out)
    for node in (home, local, *items.values(), sent):
        graph.erase_node(node)
    return out


def wait_late(node: fx.Node) -> list[str]:
    """Let all that needs no result of a wait come before it; the names of what had stood behind."""
    moved = list(independent_of(node))
    for other in moved:
        node.prepend(other)
    return [getattr(other.target, "__name__", str(other.target)) for other in moved]


def independent_of(node: fx.Node) -> Iterator[fx.Node]:
    """What stands behind a node and can as well stand before it, up to where ranks meet or anything is changed."""
    later, other = {node}, node.next
    while other.op == "get_attr" or other.target in OURS or (other.op != "root" and only_computes(other)):
        if later.isdisjoint(other.all_input_nodes):
            yield other
        else:
            later.add(other)
        other = other.next


def digest_again(gm: fx.GraphModule, moved: list[list[str]]) -> None:
    """What ranks compare of what backward will do has its order in it: of nodes that moved, too."""
    for node in gm.graph.nodes:
        if node.target in (dispatch, start_dispatch) and (digest := node.args[DIGEST]):
            after = zlib.crc32(repr((digest, moved)).encode()) & 0x7FFFFFFF or 1
            node.args = (*node.args[:DIGEST], after, *node.args[DIGEST + 1 :])
