"""Products of rows that are sorted by expert, ``torch._grouped_mm(rows, w, offs=ends)``, as products with a copy of the
weights gathered for each row.

Row r is multiplied with the matrix of the expert whose part of the rows it is in. Where the parts end is
``cumsum(how many slots each expert has)``; so the expert of row r is the r-th of the slots' experts, sorted. Written
so, the products are those with ``w[index]``, and go their way (batched.py). The copies are never made: what became part
of no operator is put back as it was.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.errors import DEFECT
from moebius.lowering.experts.positions import computed_since_the_choice, position_bounds
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.experts.routing import index_root
from moebius.lowering.operators import Call, read_call, target_name
from moebius.lowering.values import add_call, same_shape, shape_of, tensor_of

IDIOM = "grouped products of sorted rows"
UNKNOWN = (
    "it is not known which expert each row is of (what is known: a cumsum of histc or bincount of positions "
    "in an axis of experts)"
)
CAST = "autocast leaves grouped products alone, and would cast the operator's"
NO_LAYER = "they are not two or three projections, one after another, with the weights of as many experts"
Operands = tuple[fx.Node, fx.Node, fx.Node]  # rows [S, D], weights [E, D, N], where each expert's rows end [E]
EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
INDICES = (torch.int64, torch.int32)
FEW = 2048  # experts up to which a histogram's bins, which are computed in float32, hold one number each


@dataclass
class Gathered:
    """found: the grouped products written so. why: what keeps the others as they are."""

    found: list[Provisional] = field(default_factory=list)
    why: dict[fx.Node, str] = field(default_factory=dict)


def gather_weights(work: Work) -> Gathered:
    """Writes the grouped products so, where it is known which row is of which expert."""
    graph, result = work.gm.graph, Gathered()
    products = [(node, operands) for node in graph.nodes if (operands := grouped(node)) is not None]
    if products and is_cast(graph, [node for node, _ in products]):
        result.why = dict.fromkeys((node for node, _ in products), CAST)
    elif products:
        try:
            write_gathered(graph, products, result)
        except Exception as error:  # they stay, whatever went wrong
            result.why = {node: f"{DEFECT}: {type(error).__name__}: {error}" for node, _ in products}
    return result


def write_gathered(graph: fx.Graph, products: list[tuple[fx.Node, Operands]], gathered: Gathered) -> None:
    storage = Storage(graph)
    experts_of: dict[fx.Node, fx.Node | None] = {}
    for node, (rows, weight, ends) in products:
        if ends not in experts_of:
            experts_of[ends] = expert_of_each_row(ends, (shape_of(weight) or (0,))[0], node, storage)
        index = experts_of[ends]
        if index is None or not same_shape((shape_of(rows) or (0,))[:1], shape_of(index)):
            gathered.why[node] = UNKNOWN
            continue
        passed = computed_since_the_choice((ends, index))
        writer = next(filter(None, (storage.writer_between(one, node) for one in passed)), None)
        if writer is not None:
            gathered.why[node] = f"{target_name(writer)} changes what says which expert each row is of"
            continue
        with graph.inserting_before(node):
            copies = add_call(graph, node, operator.getitem, weight, index)
            result = add_call(graph, node, torch.einsum, "sd,sdn->sn", rows, copies)
        node.replace_all_uses_with(result)
        gathered.found.append(Provisional(node, result, result))


def is_cast(graph: fx.Graph, products: list[fx.Node]) -> bool:
    """Whether autocast, which leaves grouped products alone, may cast the products that would take their place."""
    types = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    types += [node.args[1] for node in graph.find_nodes(op="call_function", target=torch.set_autocast_dtype)]
    values = [tensor_of(node) for node in products]
    return any(value is None or value.dtype != one for value in values for one in types)


def left_over(graph: fx.Graph) -> list[list[fx.Node]]:
    """The grouped products that are still there, those of the same rows together: two or more of them are a layer."""
    layers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (operands := grouped(node)) is not None:
            layers.setdefault(operands[2], []).append(node)
    return [products for products in layers.values() if len(products) > 1]


def grouped(node: fx.Node) -> Operands | None:
    """The operands of a grouped product, nothing added."""
    call = read_call(node)
    if call is None or call.name != "grouped_mm":
        return None
    rows, weight, ends, *options = call.args.values()
    ranks = [len(shape_of(operand) or ()) if isinstance(operand, fx.Node) else 0 for operand in (rows, weight, ends)]
    return (rows, weight, ends) if ranks == [2, 3, 1] and not any(o is not None for o in options) else None


def expert_of_each_row(ends: fx.Node, experts: Any, at: fx.Node, storage: Storage) -> fx.Node | None:
    """The experts of the slots, sorted, where ``ends`` is said to be where each expert's rows end."""
    total = read_call(ends)
    if total is None or total.name != "cumsum" or total["dim"] not in (0, -1):
        return None
    slots = slots_counted(total["input"], experts)
    if slots is None:
        return None
    for node in at.graph.nodes:  # the program's own
        if node is at:
            break
        value = tensor_of(node)
        if is_sorted(node) and root_of(node) is root_of(slots) and value is not None and value.dtype in INDICES:
            return node
    with at.graph.inserting_before(at):
        flat = add_call(at.graph, at, "reshape", slots, -1)
        whole = add_call(at.graph, at, "to", flat, torch.int64)
        made = add_call(at.graph, at, torch.sort, whole)
        index = add_call(at.graph, at, operator.getitem, made, 0)
    for one in (flat, whole, made, index):
        storage.add(one)
    return index


def slots_counted(counts: Any, experts: Any) -> fx.Node | None:
    """The tensor of experts' numbers, each in [0, E), of which ``counts`` [E] says how many there are of each."""
    counts = uncast(counts)
    call = read_call(counts) if isinstance(counts, fx.Node) else None
    if call is None or type(experts) is not int or not 1 < experts <= FEW:
        return None
    if call.name == "histc":
        if call["bins"] != experts or call["min"] != 0 or call["max"] not in (experts - 1, experts):
            return None
    elif call.name != "bincount" or call["weights"] is not None or call["minlength"] != experts:
        return None
    slots = uncast(call["input"])
    if not isinstance(slots, fx.Node):
        return None
    bounds = position_bounds(root_of(slots))
    return slots if bounds is not None and bounds[0] >= 0 and bounds[1] <= experts else None


def uncast(node: Any) -> Any:
    """The tensor of whole numbers before it was cast to another type that has them all."""
    while isinstance(node, fx.Node) and (call := read_call(node)) is not None and call.name == "cast":
        value = tensor_of(node)
        if value is None or value.dtype not in EXACT:
            break
        node = call["input"]
    return node


def root_of(node: fx.Node) -> fx.Node:
    """The tensor that has the same numbers in whatever order."""
    while True:
        node = index_root(uncast(node))
        call = read_call(node)
        if is_sorted(node):
            assert call is not None
            node = read_call(call["input"])["input"]  # type: ignore[index]
            continue
        found = None if call is None else lookup(call)
        if found is None or not is_order(found[1]) or not same_shape(shape_of(node), shape_of(found[0])):
            return node
        node = found[0]


def lookup(call: Call) -> tuple[fx.Node, fx.Node] | None:
    """(table, positions [S]) of ``table[positions]``."""
    index = call["index"] if call.name == "getitem" or (call.name == "index_select" and call["dim"] == 0) else None
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    value = tensor_of(index) if isinstance(index, fx.Node) else None
    whole = value is not None and value.dim() == 1 and value.dtype in INDICES
    return (call["input"], index) if whole and isinstance(call["input"], fx.Node) else None  # type: ignore[return-value]


def is_sorted(node: fx.Node) -> bool:
    """``torch.sort(flat)[0]`` of one axis, the smallest first."""
    return part_of_sort(node, 0)


def is_order(node: Any) -> bool:
    """Where the items of a tensor of one axis are, smallest first: ``torch.sort(flat)[1]``, ``torch.argsort(flat)``."""
    if not isinstance(node, fx.Node):
        return False
    call = read_call(node)
    if call is not None and call.name == "argsort":
        return not call["descending"] and len(shape_of(node) or ()) == 1
    return part_of_sort(node, 1)


def sorted_by(order: fx.Node) -> fx.Node:
    """What ``order`` is the order of."""
    call = read_call(order)
    assert call is not None
    source = call if call.name == "argsort" else read_call(call["input"])
    assert source is not None
    return source["input"]


def part_of_sort(node: fx.Node, part: int) -> bool:
    call = read_call(node)
    if call is None or call.name != "getitem" or call["index"] != part or not isinstance(call["input"], fx.Node):
        return False
    made = read_call(call["input"])
    return made is not None and made.name == "sort" and not made["descending"] and len(shape_of(node) or ()) == 1
