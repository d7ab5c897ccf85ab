"""Weights that lowering joins for the experts operator (gate and up that are two parameters, experts with parameters of
their own) are not joined where the operator takes the parts, and elsewhere not kept for backward.

The joined tensor is a copy of all experts' weights, its gradient another, and autograd would keep the copies of every
layer at once. So the operator's call says which parts its weights are of. On a CPU it computes with the parts where
they lie, each of which gets its own gradient; elsewhere the parts are joined at the call, and joined again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.kernels import equal_blocks, experts
from moebius.kernels.contract import Options
from moebius.kernels.equal_blocks import experts_in_blocks, layout_of
from moebius.kernels.separate_weights import Block, experts_apart, refuse_other_data
from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Contract, Work
from moebius.lowering.dead_code import drop_dead_code
from moebius.lowering.experts.sorting import project
from moebius.lowering.experts.stacking import join_blocks, stack_experts
from moebius.lowering.experts.views import seen_as
from moebius.lowering.graph import LoweringOptions
from moebius.lowering.operators import read_call
from moebius.lowering.roofline.slots import RECORDER
from moebius.lowering.step.checkpoint import is_marked
from moebius.lowering.torch_private import default_saved_tensors_hooks, same_size, version_of
from moebius.lowering.values import shape_of, tensor_of

CONTRACT = Contract(
    name="weight concat",
    needs="a well-formed graph",
    promises="a well-formed graph of the same meaning, whose experts operators keep no weights that were joined",
    run=lambda work: join_again(work),
    wanted=lambda work: applies(work.options) and not is_marked(work.gm),
)

WEIGHTS = ("gate_up_bias", "down_bias")  # keyword arguments of the operator that may be joined, besides two others
JOINED = "joined"  # in a node's meta: lowering wrote this torch.cat, under the grad mode of the operator that reads it


def applies(options: LoweringOptions) -> bool:
    """Whether this pass runs: what comes after it (a mesh, a foreign backend) knows the plain operator only."""
    return options.mesh is None and options.backend == "moebius"


def join_again(work: Work) -> None:
    """``experts(x, cat(a, b), …)`` becomes ``experts_of_parts(x, blocks of a and b, …)``."""
    graph = work.gm.graph
    nodes = graph.find_nodes(op="call_function", target=experts)
    storage = Storage(graph) if nodes else None
    for node in nodes:
        assert storage is not None
        parts = on_cpu(node.args[0]) and not RECORDER.on  # (which counts slots at the operator)
        given: dict[int | str, Any] = {1: node.args[1], 2: node.args[2]}
        given.update({name: node.kwargs.get(name) for name in WEIGHTS})
        blocks: dict[Any, Any] = {}
        indices: list[Any] = []
        for place, weight in given.items():
            apart = is_joined(weight) or (parts and is_turned(weight))
            found = blocks_of(weight, storage, indices) if apart else None
            if found is not None:
                blocks[place] = found
        equal = experts_in_order(node) if parts else None
        if not (blocks or equal) or len(set(indices)) > 1:
            continue
        node.target = experts_of_parts
        node.args = tuple(blocks.get(i, argument) for i, argument in enumerate(node.args))
        node.kwargs = {name: blocks.get(name, argument) for name, argument in node.kwargs.items()}
        if indices and indices[0] is not None:
            node.kwargs = {**node.kwargs, "hit": indices[0]}
        elif equal:
            work.loose.append(node.args[3])
            node.args = (*node.args[:3], None, *node.args[4:])
            node.kwargs = {**node.kwargs, "equal": equal}
        work.loose += [weight for place, weight in given.items() if place in blocks]
    for node in graph.find_nodes(op="call_function", target=project):
        storage = storage or Storage(graph)
        take_parts(work, node, storage)
    drop_dead_code(work)


def take_parts(work: Work, node: fx.Node, storage: Storage) -> None:
    """``project(rows, stack_experts(…), …)`` takes the parameters where they lie."""
    indices: list[Any] = []
    args = list(node.args)
    for place in (1, 3):
        weight = args[place]
        if not isinstance(weight, fx.Node) or not is_joined(weight):
            continue
        found = blocks_of(weight, storage, indices)
        if found is not None and len(found) == 1 and isinstance(found[0][1], tuple):
            args[place] = found[0]
            work.loose.append(weight)
    if len(set(indices)) < 2:
        node.args = (*args, *indices[:1])


def is_joined(weight: Any) -> bool:
    """Whether lowering made this tensor of several."""
    while isinstance(weight, fx.Node) and weight.target is torch.transpose:
        weight = weight.args[0]
    return isinstance(weight, fx.Node) and (weight.target is stack_experts or bool(weight.meta.get(JOINED)))


def is_turned(weight: Any) -> bool:
    """Whether it lies the other way round than the operator takes it. (Its gradient is then written as it lies: one
    that autograd turns is copied.)"""
    return isinstance(weight, fx.Node) and weight.target is torch.transpose


def experts_in_order(node: fx.Node) -> int | None:
    """How many experts there are, where the operator's rows lie expert after expert, as many for each, with one slot
    and no weight."""
    x, column = node.args[0], read_call(node.args[3])
    if node.args[4] is not None or column is None or column.name != "unsqueeze":
        return None
    flat = read_call(column["input"])
    if flat is not None and flat.name == "block_experts" and isinstance(x, fx.Node) and x.target is not join_blocks:
        counts = [(shape_of(rows) or (None,))[0] for rows in flat["rows"]]  # (a whole tensor's pieces)
        return len(counts) if all(same_size(count, counts[0]) for count in counts) else None
    if flat is None or flat.name != "reshape":
        return None
    numbers, axes, _ = seen_as(flat["input"])
    made = read_call(numbers)
    if made is None or made.name != "arange" or axes[:1] != (0,) or any(axis is not None for axis in axes[1:]):
        return None
    bounds = made["bounds"]
    return bounds[0] if len(bounds) == 1 and type(bounds[0]) is int else None


def on_cpu(node: Any) -> bool:
    value = tensor_of(node)
    return value is not None and value.device.type == "cpu"


def blocks_of(node: fx.Node, storage: Storage, indices: list[Any]) -> Any:
    """The blocks of rows (kernels.separate_weights.Block) that a weight was joined of: views of the graph's inputs,
    which are there in backward too; or None. indices: here go the routing indices that say which experts get
    gradients."""
    if node.target is torch.cat and node.meta.get(JOINED):
        found = [blocks_of(part, storage, indices) for part in node.all_input_nodes]
        return None if any(part is None for part in found) else tuple(block for part in found for block in part)
    if node.target is torch.transpose and node.args[1:] == (1, 2) and isinstance(node.args[0], fx.Node):
        found = blocks_of(node.args[0], storage, indices)
        return None if found is None or len(found) != 1 else ((not found[0][0], found[0][1]),)
    if node.target is stack_experts:
        index, *parts = node.args
        indices.append(index)
        return ((False, tuple(parts)),)  # the graph's inputs: rewrite.py's iterations stack nothing else
    return ((False, node),) if all(root.op == "placeholder" for root in storage.roots[node]) else None


# ----------------------------------------------------------------------------------------------------------------------
# When the graph runs
# ----------------------------------------------------------------------------------------------------------------------


def experts_of_parts(
    x: torch.Tensor, gate_up: Any, down: Any, index: torch.Tensor | None, weight: torch.Tensor | None,
    activation: str, *, gate: str, gate_up_bias: Any, down_bias: Any, save: str = "default", precision: str = "",
    hit: torch.Tensor | None = None, equal: int = 0,
) -> Any:
    """``experts(…)`` whose weights may each be a tensor or blocks of rows (kernels.separate_weights.Block), joined as
    its contract wants them. hit: as in :func:`stack_experts`. equal: of how many experts the rows are, expert after
    expert, as many for each; there is no index then.

    Backward raises RuntimeError where a part was changed in place since, as it does for every tensor that is kept.
    """
    named = {"gate": gate, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    takes = takes_parts(x, save, precision)
    if index is None:
        asked = Options(activation, gate, save)
        weights = [as_blocks(each) for each in (gate_up, down, gate_up_bias, down_bias)]
        found = layout_of(weights[0], weights[1], weights[2], weights[3], gate) if takes else None
        if found is not None and equal_blocks.takes(x, found[0], asked):
            return experts_in_blocks(x, *found, equal, asked)
        index = torch.arange(equal, dtype=torch.int64, device=x.device).repeat_interleave(len(x) // equal)[:, None]
    if takes:
        return experts_apart(x, gate_up, down, index, weight, activation, **named, save=save, hit=hit)
    known: dict[int, Any] = {}

    def joined(weight: Any) -> Any:
        if weight is None or isinstance(weight, torch.Tensor):
            return weight
        if len(weight) == 1 and isinstance(weight[0][1], torch.Tensor):  # nothing is joined
            return join(weight)
        made = join(weight, hit)
        known[made.untyped_storage().data_ptr()] = weight
        return made

    args = (x, joined(gate_up), joined(down), index, weight, activation)
    options = {**named, "gate_up_bias": joined(gate_up_bias), "down_bias": joined(down_bias), "save": save}
    if not known or not torch.is_grad_enabled():
        return experts(*args, **options, precision=precision)
    outer = default_saved_tensors_hooks()  # of an activation checkpoint around this step, for one
    keep, give = outer if outer is not None else (same, same)

    def pack(tensor: torch.Tensor) -> Any:
        blocks = known.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if blocks is None:
            return False, keep(tensor)
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return True, (kept_parts(blocks, keep), layout)

    def unpack(packed: Any) -> torch.Tensor:
        is_joined, held = packed
        if not is_joined:
            return give(held)
        blocks, layout = held
        with torch.no_grad():
            return join(given_back(blocks, give)).as_strided(*layout)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return experts(*args, **options, precision=precision)


def as_blocks(weight: Any) -> Any:
    return (Block(False, weight),) if isinstance(weight, torch.Tensor) else weight and [Block(*each) for each in weight]


def takes_parts(x: torch.Tensor, save: str, precision: str) -> bool:
    """Whether there is a form of the operator that computes with the parts."""
    plain = save != "fp8" and not precision and not torch.is_autocast_enabled(x.device.type)
    return x.device.type == "cpu" and plain


def same(value: Any) -> Any:
    return value


def join(blocks: Any, hit: torch.Tensor | None = None) -> torch.Tensor:
    """[E, rows, …]: blocks of rows as one tensor."""
    made = []
    for turned, parts in blocks:
        block = parts if isinstance(parts, torch.Tensor) else stack_experts(hit, *parts)
        made.append(block.mT if turned else block)
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def kept_parts(blocks: Any, keep: Any) -> Any:
    """The blocks with what the outer hooks make of each part, and the version that the part has now; and where it lies,
    if autograd would look there again."""

    def kept(part: torch.Tensor, address: int | None = None) -> Any:
        return keep(part.detach()), part, version_of(part), address

    return [
        (
            turned,
            kept(parts)
            if isinstance(parts, torch.Tensor)
            else [kept(part, part.data_ptr() if turned and part.is_leaf else None) for part in parts],
        )
        for turned, parts in blocks
    ]


def given_back(blocks: Any, give: Any) -> Any:
    """What was kept of blocks, as tensors again."""

    def given(kept: Any) -> torch.Tensor:
        held, part, version, address = kept
        if address is not None:
            refuse_other_data([(part, address)])
        if version_of(part) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"expert's weight of shape {tuple(part.shape)} has version {version_of(part)}, and had {version}"
            )
        return give(held)

    return [(turned, tuple(map(given, held)) if isinstance(held, list) else given(held)) for turned, held in blocks]


fx.wrap("experts_of_parts")
