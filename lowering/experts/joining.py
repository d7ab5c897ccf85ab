"""Weights that lowering joins for the experts operator are joined once more for backward, rather than kept.

Gate and up that are two parameters, and experts with parameters of their own, are put into one tensor at each call
(``torch.cat``, ``stack_experts``). Autograd would keep that copy of all experts' weights, of every layer at once; the
parts are there anyway. So the operator's call says what its weights were joined of, and backward joins them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.kernels import experts
from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Contract, Work, well_formed
from moebius.lowering.experts.stacking import stack_experts
from moebius.lowering.graph import LoweringOptions
from moebius.lowering.step.checkpoint import is_marked
from moebius.lowering.torch_private import default_saved_tensors_hooks

CONTRACT = Contract(
    name="joining",
    needs="a well-formed graph",
    promises="a well-formed graph of the same meaning, whose experts operators keep no weights that were joined",
    need=(well_formed,),
    promise=(well_formed,),
    run=lambda work: join_again(work),
    wanted=lambda work: applies(work.options) and not is_marked(work.gm.graph),
)

WEIGHTS = ("gate_up_bias", "down_bias")  # keyword arguments of the operator that may be joined, besides the first ones


def applies(options: LoweringOptions) -> bool:
    """Whether this pass runs: what comes after it (a mesh, a foreign backend) knows the plain operator only."""
    return options.mesh is None and options.backend == "moebius"


def join_again(work: Work) -> None:
    """``experts(x, cat(a, b), …)`` becomes ``experts_rejoining((cat,), (how it was joined,), x, cat, …)``."""
    graph = work.gm.graph
    nodes = graph.find_nodes(op="call_function", target=experts)
    storage = Storage(graph) if nodes else None
    for node in nodes:
        assert storage is not None
        weights = [*node.args[1:3], *(node.kwargs.get(name) for name in WEIGHTS)]
        joined: dict[fx.Node, Any] = {}
        for weight in weights:
            made = joined_at(weight)
            recipe = None if made is None else recipe_of(made, storage)
            if made is not None and recipe is not None:
                joined[made] = recipe
        if joined:
            node.target = experts_rejoining
            node.args = (tuple(joined), tuple(joined.values()), *node.args)


def joined_at(weight: Any) -> fx.Node | None:
    """The node that joined a weight, before views of it."""
    while isinstance(weight, fx.Node) and weight.target is torch.transpose:
        weight = weight.args[0]
    return weight if isinstance(weight, fx.Node) and weight.target in (torch.cat, stack_experts) else None


def recipe_of(node: fx.Node, storage: Storage) -> Any:
    """How a tensor is joined, down to views of the graph's inputs, which are there in backward too; or None.

    ("cat", dim, parts), ("stack", 0, parts), ("turned", 0, (part,)); a part is a node or a recipe.
    """
    if node.target is torch.cat and len(node.args) == 2 and not node.kwargs:
        kind, dim, parts = "cat", node.args[1], node.args[0]
    elif node.target is stack_experts:
        kind, dim, parts = "stack", 0, node.args[1:]
    elif node.target is torch.transpose and joined_at(node) is not None and node.args[1:] == (1, 2):
        kind, dim, parts = "turned", 0, node.args[:1]
    else:
        return node if all(root.op == "placeholder" for root in storage.roots[node]) else None
    found = [recipe_of(part, storage) if isinstance(part, fx.Node) else None for part in parts]  # type: ignore[union-attr]
    return None if any(part is None for part in found) else (kind, dim, tuple(found))


# ----------------------------------------------------------------------------------------------------------------------
# When the graph runs
# ----------------------------------------------------------------------------------------------------------------------


def experts_rejoining(joined: tuple[torch.Tensor, ...], recipes: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """``experts(*args, **kwargs)``, which keeps for backward the parts of the ``joined`` weights and not these.

    Backward raises RuntimeError where a part was changed in place since, as it does for every tensor that is kept.
    """
    if not torch.is_grad_enabled():
        return experts(*args, **kwargs)
    outer = default_saved_tensors_hooks()  # of an activation checkpoint around this step, for one
    keep, give = outer if outer is not None else (same, same)
    known = {tensor.untyped_storage().data_ptr(): recipe for tensor, recipe in zip(joined, recipes, strict=True)}

    def pack(tensor: torch.Tensor) -> Any:
        recipe = known.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if recipe is None:
            return False, keep(tensor)
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return True, (kept_parts(recipe, keep), layout)

    def unpack(packed: Any) -> torch.Tensor:
        is_recipe, held = packed
        if not is_recipe:
            return give(held)
        parts, layout = held
        with torch.no_grad():
            return join(parts, give).as_strided(*layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return experts(*args, **kwargs)


def same(value: Any) -> Any:
    return value


def kept_parts(recipe: Any, keep: Any) -> Any:
    """The recipe with what the outer hooks make of each part, and the version that the part has now."""
    if isinstance(recipe, torch.Tensor):
        return keep(recipe.detach()), recipe, recipe._version
    kind, dim, parts = recipe
    return kind, dim, [kept_parts(part, keep) for part in parts]


def join(kept: Any, give: Any) -> torch.Tensor:
    kind, *rest = kept
    if not isinstance(kind, str):
        part, version = rest
        if part._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"expert's weight of shape {tuple(part.shape)} has version {part._version}, and had {version}"
            )
        return give(kind)
    dim, parts = rest
    tensors = [join(part, give) for part in parts]
    if kind == "turned":
        return tensors[0].transpose(1, 2)
    return torch.cat(tensors, dim) if kind == "cat" else torch.stack(tensors)


fx.wrap("experts_rejoining")
