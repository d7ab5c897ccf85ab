"""Drops what only replaced loops used (masks, hit lists), and grad-mode switches that switch nothing.

Not fx's own elimination: that one takes any unused method call for dead, ``x.add_(1)`` too.
"""

from __future__ import annotations

import torch
from torch import fx

from moebius.lowering.aliasing import only_computes, writes_into
from moebius.lowering.contract import Contract, Work
from moebius.lowering.experts.unrolled_loops import DRAWN
from moebius.lowering.operators import read_call
from moebius.lowering.step.given_out import is_differentiable
from moebius.lowering.torch_private import set_grad_enabled
from moebius.lowering.values import needs_gradient

CONTRACT = Contract(
    name="dead code",
    needs="a well-formed graph",
    promises="a well-formed graph of the same meaning, side effects and random numbers included",
    run=lambda work: drop_dead_code(work),
)


def drop_dead_code(work: Work) -> None:
    """Remove the loose nodes that nobody uses, and then what nobody uses any more."""
    drop_loose(work)
    graph = work.gm.graph
    drop_idle_switches(graph)
    used = {str(node.target).split(".")[0] for node in graph.nodes if node.op in ("get_attr", "call_module")}
    for name in [name for name, _ in work.gm.named_children() if name not in used]:
        delattr(work.gm, name)  # (fx's own sweep would take the bodies out of bodies, which capture's graph shares)


def drop_loose(work: Work) -> None:
    """The same of the loose nodes and what only they use, without a walk over the graph."""
    pending = list(work.loose)
    gone: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in gone or node.users or not (only_computes(node) or node.meta.get(DRAWN)):
            continue
        pending += node.all_input_nodes
        gone.add(node)
        work.gm.graph.erase_node(node)
    work.loose.clear()


def drop_idle_switches(graph: fx.Graph) -> None:
    """A grad-mode switch that the next node overrides, or that sets the mode that is set already, does nothing; nor do
    two around what makes nothing of a tensor that needs a gradient."""
    cut = cut_off(graph)
    mode: bool | None = None  # as the graph begins, nobody knows
    node = next(iter(graph.nodes), None)
    while node is not None and node.op != "root":
        following = node.next
        if not is_switch(node):
            mode = True if mode is None and is_differentiable(node) else mode
        elif is_switch(following) or node.args[0] == mode:
            graph.erase_node(node)
        elif mode is True and (back := end_of_constants(node, cut)) is not None:
            following = following if following is not back else back.next
            graph.erase_node(back)
            graph.erase_node(node)
        else:
            mode = bool(node.args[0])
        node = following


def end_of_constants(switch: fx.Node, cut: set[int]) -> fx.Node | None:
    """Where gradients are switched on again, if nothing between would have any without the switch: whole numbers,
    and what is made of tensors that need no gradient, or is written into them. cut: values, as :func:`cut_off` says."""
    node = switch.next
    while not is_switch(node):
        if node.op not in ("call_function", "call_method") or not (only_computes(node) or read_call(node)):
            return None
        of_constants = all(is_constant(one) and id(one.meta.get("val")) not in cut for one in node.all_input_nodes)
        if not (is_constant(node) and (of_constants or (only_computes(node) and is_whole(node)))):
            return None
        node = node.next
    return node if node.args[0] is True and node is not switch.next else None


def cut_off(graph: fx.Graph) -> set[int]:
    """The values that may have had a history before something took it from them: nodes say what was there at last."""
    names = ("detach_", "requires_grad_")
    cutting = [n for name in names for n in graph.find_nodes(op="call_method", target=name)]
    cutting += graph.find_nodes(op="call_function", target=torch.detach_)
    return {id(node.args[0].meta.get("val")) for node in cutting}


def is_constant(node: fx.Node) -> bool:
    """Whether it needs no gradient: a number or a tensor, several, or nothing, of what writes."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    known = (torch.Tensor, int, float, torch.SymInt, torch.SymBool, torch.SymFloat)
    return not needs_gradient(parts) and all(
        isinstance(one, known) or (one is None and writes_into(node)) for one in parts
    )


def is_whole(node: fx.Node) -> bool:
    """Whether it makes whole numbers, or tensors of them, one or several."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    return bool(parts) and all(
        not one.dtype.is_floating_point and not one.dtype.is_complex if isinstance(one, torch.Tensor)
        else isinstance(one, int | torch.SymInt | torch.SymBool) for one in parts
    )  # fmt: skip


def is_switch(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not set_grad_enabled:
        return False
    call = read_call(node)
    return call is not None and isinstance(call["mode"], bool)
