"""What the operator keeps for backward (x, the experts' weights, the routing weights) must be in backward what it was.

Plain Python's loop keeps copies of the rows and of what each expert gave. The operator computes these again, from x and
the weights: a write into them on the way to backward, past autograd's versions (``p.data.mul_(…)``) or not, is seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from moebius.lowering.aliasing import Storage, gradients_before, writes_of_hooks
from moebius.lowering.experts.reader import Reader
from moebius.lowering.experts.stacking import join_blocks, stack_experts
from moebius.lowering.step import is_backward
from moebius.lowering.values import reaches, tensor_of


def writer_before_backward(
    storage: Storage, loop: fx.Node, kept: Iterable[fx.Node], through: Iterable[fx.Node], out: fx.Node
) -> fx.Node | None:
    """The first node after the loop that may write into what is kept, before a backward that goes through the loop
    or, in a graph without backward, before whatever backward its result will get; None if there is none.

    out: what the loop adds to. A loop that was just built leads nowhere yet: backward goes through it if through one of
    ``through``, which its iterations read.
    """
    nodes = list(dict.fromkeys(node for one in kept for node in parts_of(one)))
    ours = storage.family(out)
    for x in through:
        ours.update(parts_of(x))
        # its rows were just picked anew: the user's iterations picked them of the same tensor
        if x.target is join_blocks:
            ours.update(source for rows in parts_of(x) for source in rows.all_input_nodes)
    graph = loop.graph
    after = [node for node in storage.backwards if node.graph is graph and loop < node]
    needs_gradients = any(t is not None and t.requires_grad for t in map(tensor_of, nodes))
    if not (after or needs_gradients):
        return None
    for writer in storage.writers_of(nodes, loop):
        if writer.graph is not graph or (after and after[-1] < writer):
            continue
        if is_backward(writer) and not any(storage.share(n, t) for n in nodes for t in written_by_backward(writer)):
            continue
        if not after or any(not node < writer and reaches({node}, ours, min(ours)) for node in after):
            return writer
    return None


def written_by_backward(node: fx.Node) -> list[fx.Node]:
    """Every ``.grad``; and what hooks write into, but for their own parameter: with that, backward is done by then."""
    hooked = [target for tensor, targets in writes_of_hooks(node) for target in targets if target is not tensor]
    return gradients_before(node) + hooked


def before_the_loop(reader: Reader, node: fx.Node) -> list[fx.Node]:
    """The node, or for one of the body that is the same in each iteration, what it is made of before the loop."""
    if node.graph is reader.loop.graph:
        return [node]
    if node.op == "placeholder":
        outer = reader.outer_of(node)
        return [outer] if isinstance(outer, fx.Node) else []
    return [found for argument in node.all_input_nodes for found in before_the_loop(reader, argument)]


def parts_of(node: fx.Node) -> list[fx.Node]:
    """The node, or what lowering joins to it: the experts' parameters, the rows of each expert."""
    return list(node.all_input_nodes) if node.target in (stack_experts, join_blocks) else [node]
