"""What a loop over experts keeps for backward as it is written: what autograd keeps of each operator of an iteration.

An iteration runs on tensors without memory, with two numbers of rows: what it keeps is the same for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.claims import Claim
from moebius.lowering.experts.missed_experts import root_of
from moebius.lowering.torch_private import storage_of, unbacked_symbols
from moebius.lowering.values import apply, needs_gradient

FEW = 2  # rows (one would be spread over others)


def kept_as_written(claim: Claim) -> Callable[[], int | None]:
    """What says it of a proven loop, whose iterations run the rows of all slots together."""
    reader, index = claim.reader, claim.index.meta["val"]
    given = [(one, reader.outer_of(one)) for one in reader.placeholders if needs_gradient(one.meta.get("val"))]
    parameters = {one for one, node in given if isinstance(node, fx.Node) and root_of(node) is not None}
    return partial(kept_by_loop, reader.body, parameters, index.numel(), claim.experts)


def kept_by_loop(body: fx.GraphModule, parameters: Set[fx.Node], rows: Any, iterations: int) -> int | None:
    """Bytes; None where it cannot be said. parameters: placeholders, which are not counted. rows: of all iterations
    together. iterations: so many run, or fewer."""
    if type(rows) is not int:
        return None
    try:
        (few, shared), (more, _) = (kept_by_iteration(body, parameters, count) for count in (FEW, FEW + 1))
    except Exception:  # a figure of a report: nobody loses the report for it
        return None
    return shared + (more - few) * rows + (few - (more - few) * FEW) * iterations


def kept_by_iteration(body: fx.GraphModule, parameters: Set[fx.Node], rows: int) -> tuple[int, int]:
    """(what one iteration keeps of its own, what all of them keep of what was there before), with so many rows."""
    known: dict[fx.Node, Any] = {}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(storage_of(tensor), tensor)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for node in body.graph.nodes:
            if node.op == "output":
                break
            if node.op.startswith("call_") and any(needs_gradient(known[one]) for one in node.all_input_nodes):
                args, kwargs = (fx.map_arg(part, known.__getitem__) for part in (node.args, node.kwargs))
                known[node] = apply(node, args, kwargs)
            else:
                known[node] = like(node.meta.get("val"), rows)
    inputs = [node for node in body.graph.find_nodes(op="placeholder") if is_tensor(known[node])]
    given = {storage_of(known[node]): node for node in inputs}
    sizes = [(given.get(one), tensor.untyped_storage().nbytes()) for one, tensor in kept.items()]
    own, shared = (sum(size for node, size in sizes if (node is None) == inside) for inside in (True, False))
    return own, shared - sum(size for node, size in sizes if node in parameters)


def like(value: Any, rows: int) -> Any:
    """A value of the same sizes; one that only the running step knows is the number of rows."""
    if isinstance(value, tuple | list):
        return type(value)(like(item, rows) for item in value)
    if isinstance(value, torch.SymInt):
        return rows if unbacked_symbols(value) else int(value)
    if not is_tensor(value):
        return value
    device = "meta" if value.dim() or value.is_floating_point() else "cpu"  # (a whole number may be an index)
    made = torch.zeros([like(size, rows) for size in value.shape], dtype=value.dtype, device=device)
    return made.requires_grad_().clone() if value.requires_grad else made  # (which may be written into)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
