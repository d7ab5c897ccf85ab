"""Where a step waits for its device: what Python needs to know of a tensor's numbers before it can go on.

Read off a graph's fakes, so that a step that was captured on a CPU tells what it would wait for on a GPU. Contract: a
node is named where its result holds a number, or a size, that no argument of it has (a symbol that only the running
step knows), where it asks a tensor whether to go on, where it copies from a device to the CPU, and where it writes at
the places of a mask. Tensors of no dimension that come in and are computed from nothing else do not count: torch keeps
such (an optimizer's step) on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import call_operands, loop_body, read_call
from moebius.lowering.step.branches import chosen
from moebius.lowering.torch_private import unbacked_symbols
from moebius.lowering.values import Where, tensor_of, users_place, value_of

NUMBER, SIZE = "reads numbers of a tensor", "sizes that numbers of a tensor decide"
BRANCH, COPY, MASKED = "a branch that a tensor decides", "a copy to the CPU", "writes where a mask says"


class SyncPoint(NamedTuple):
    """why: one of the above. operator: that waits, as torch names it (a branch: ``bool``). place: the user's line."""

    why: str
    operator: str
    place: Where


def sync_points(gm: fx.GraphModule) -> list[SyncPoint]:
    """The sync points of a graph and of the bodies in it, in order."""
    found: list[SyncPoint] = []
    bodies = of_graph(gm.graph, set(gm.graph.find_nodes(op="placeholder")), found, {})
    for module in gm.modules():  # bodies of hooks, checkpoints and the like
        if isinstance(module, fx.GraphModule) and module is not gm and module not in bodies:
            bodies |= of_graph(module.graph, set(), found, {})
    return found


def of_graph(
    graph: fx.Graph, given: set[fx.Node], found: list[SyncPoint], outside: dict[fx.Node, Any]
) -> set[fx.GraphModule]:
    """Adds a graph's sync points, with those of its loops' bodies; gives these bodies. given: the inputs that may be on
    the CPU by themselves. outside: of the inputs of bodies, what they are outside."""
    on_host, bodies = set[fx.Node](), set[fx.GraphModule]()
    for node in graph.nodes:
        tensors = [argument for argument in node.all_input_nodes if tensor_of(argument) is not None]
        if is_lone(node) and (node in given or (tensors and on_host.issuperset(tensors))):
            on_host.add(node)
        if tensors and not on_host.issuperset(tensors) and (why := waits(node)) is not None:
            name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
            place = users_place(asked(node, outside) if why == BRANCH else node)
            found.append(SyncPoint(why, "bool" if why == BRANCH else name, place))
        if node.target is expert_loop and (call := read_call(node)) is not None:
            body = loop_body(node)
            inputs = dict(zip(list(body.graph.find_nodes(op="placeholder"))[1:], call_operands(call)[1:], strict=False))
            here = {inner for inner, operand in inputs.items() if operand in on_host}
            bodies |= {body, *of_graph(body.graph, here, found, {**outside, **inputs})}
    return bodies


def asked(node: fx.Node, outside: dict[fx.Node, Any]) -> fx.Node:
    """Where a tensor that decides a branch was computed: the branch itself has no node of its own."""
    found: Any = node.args[0]
    while True:
        call = read_call(found)
        if found in outside:
            found = outside[found]
        elif call is not None and call.name in ("logical_not", "clone"):
            found = call["input"]
        else:
            return found if isinstance(found, fx.Node) and found.op != "placeholder" else node


def is_lone(node: fx.Node) -> bool:
    """Whether it is a tensor of no dimension in the CPU's memory."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 0 and tensor.device.type == "cpu"


def waits(node: fx.Node) -> str | None:
    """Why a node waits for the device, if it does."""
    call, found = read_call(node), list(parts(value_of(node)))
    before = [part for given in node.all_input_nodes for part in parts(value_of(given))]
    known = set().union(*map(unbacked_symbols, before))
    new = [part for part in found if not unbacked_symbols(part) <= known]
    if new:
        return SIZE if isinstance(new[0], torch.Tensor) else NUMBER
    if call is not None and call.name == "item":  # (it may choose where the ways of a branch meet)
        return BRANCH if node.users and all(user.target is chosen for user in node.users) else NUMBER
    if call is not None and call.name in ("skip_iteration", "require_branch") and tensor_of(node.args[0]) is not None:
        return BRANCH
    if any(map(is_here, found)) and any(isinstance(part, torch.Tensor) and not is_here(part) for part in before):
        return COPY
    if call is not None and call.name in ("setitem", "index_put") and writes_at_mask(call.args):
        return MASKED
    return None


def is_here(value: Any) -> bool:
    """Whether it is a tensor in the CPU's memory."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def writes_at_mask(args: dict[str, Any]) -> bool:
    """Whether tensors are written at a mask's places. (A number is, without asking how many there are.)"""
    value = tensor_of(args.get("value", args.get("values")))
    index = args.get("index", args.get("indices"))
    masks = (tensor_of(part) for part in (index if isinstance(index, tuple | list) else (index,)))
    return value is not None and value.dim() > 0 and any(m is not None and m.dtype == torch.bool for m in masks)


def parts(value: Any) -> Iterator[Any]:
    """A value, or those in the tuples and lists of it."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from parts(item)
    else:
        yield value

