"""Statements in the form that the front ends read, each with the same value:

    torch.addcmul(y, a, b)                                        y + a * b
    torch.where(chosen, y + rows, y)                              y + torch.where(chosen, rows, 0)
    w.index_select(0, index.view(-1)).view(T, K, D, N)            w[index]
    expert(x) * gate[:, None] * 2.0                               expert(x) * 2.0 * gate[:, None]
    torch.gather(w, 0, index[:, None, None].expand(-1, D, N))     w[index]
    torch.einsum("tke,edn->tkdn", one_hot(index, E), w)           w[index]
    gates @ one_hot(torch.tensor(e), E)                           gates[..., e]
    (gates * one_hot(torch.tensor(e), E)).sum(-1)                 gates[..., e]
    torch.tensordot(x, w, dims=([1], [1]))                        torch.einsum("td,edn->ten", x, w)
    torch.vmap(f)(rows, w1, w2)                                   f, its products batched (unbatched.py)
    f(torch.cat(parts)).split(sizes)[e]                           f(parts[e]) (split_phases.py)

What becomes part of no operator is put back as it was (provisional.py).
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.masked import scaled_rows
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.experts.routing import index_bounds
from moebius.lowering.experts.split_phases import pieces_by_themselves
from moebius.lowering.experts.unbatched import without_vmap
from moebius.lowering.experts.views import equation_of, seen_as
from moebius.lowering.experts.zeros import one_of
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.step.function_transforms import function_transform
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import add_call, dtype_of, nodes_between, rank_of, same_shape, shape_of, tensor_of

FAR = 40  # nodes looked at behind a statement: the forms look at a handful
Found = tuple[fx.Node, fx.Node] | None  # (the result, its core: see Provisional)


def write_plainly(work: Work) -> list[Provisional]:
    """Writes such statements so, where nothing is written into what they read."""
    graph, found = work.gm.graph, list[Provisional]()
    storage: Storage | None = None
    pieces = [node for node in graph.nodes if node.target is operator.getitem and shape_of(node.args[0]) is None]
    work.loose += [node for node in pieces if not node.users]
    for node in list(graph.nodes):
        call, before = read_call(node), node.prev
        name = call.name if call is not None else node.target if node.op == "call_function" else None
        if name in PIECES:
            found += in_pieces(node, PIECES[name])
        if (form := FORMS.get(name)) is None:
            continue
        with graph.inserting_before(node):
            made = form(node, call)
        if made is not None:
            storage = storage or Storage(graph)
            new = list(nodes_between(before, node))
            reads = {argument for one in new for argument in one.all_input_nodes} - set(new)
            for one in new:
                storage.add(one)
            if is_same(node, made[0], reads) and not is_written(node, made[0], reads, storage):
                node.replace_all_uses_with(made[0])
                found.append(Provisional(node, *made))
                continue
        erase(before, node)
    return found


def erase(before: fx.Node, node: fx.Node) -> None:
    """Takes out what stands between the two."""
    while node.prev is not before:
        node.graph.erase_node(node.prev)


def is_written(node: fx.Node, result: fx.Node, reads: set[fx.Node], storage: Storage) -> bool:
    """Whether something is written into what the plain form reads, or into what stands between that and the statement,
    before this, or into what either gives (the form may give a view). (What the statement itself reads, the form reads
    at the same time.)"""
    between = [one for one in node.all_input_nodes if one not in reads]
    for one in between:
        if len(between) < FAR:
            between += [argument for argument in one.all_input_nodes if argument not in {*reads, *between}]
    into = (*between, *reads) if between else ()
    written = any(True for _ in storage.writers_of(into, min(between, default=node), node))
    return written or any(True for _ in storage.writers_of((node, result), node))


def is_same(node: fx.Node, result: fx.Node, reads: Iterable[fx.Node]) -> bool:
    """Whether the two give tensors of one kind. reads: what the result is made of: with its history, if it has one."""
    one, other = tensor_of(node), tensor_of(result)
    if one is None or other is None or one.dtype != other.dtype or not same_shape(shape_of(node), shape_of(result)):
        return False
    return one.requires_grad == any(value.requires_grad for each in reads if (value := tensor_of(each)) is not None)


def in_pieces(node: fx.Node, form: Callable[[fx.Node], Any]) -> Iterator[Provisional]:
    """Each of what a node gives, by number, as the form has it."""
    before = node.prev
    with node.graph.inserting_before(node):
        pieces = None if any(user.target is not operator.getitem for user in node.users) else form(node)
    if pieces is None:
        return erase(before, node)
    for user in [user for user in node.users if user.users]:
        result, core = pieces[user.args[1]]
        if is_same(user, result, node.all_input_nodes):
            user.replace_all_uses_with(result)
            yield Provisional(user, result, core)


# ----------------------------------------------------------------------------------------------------------------------
# The forms
# ----------------------------------------------------------------------------------------------------------------------


def product_added(node: fx.Node, call: Call) -> Found:
    """addcmul."""
    if call["value"] != 1:
        return None
    product = add_call(node.graph, node, torch.mul, call["tensor1"], call["tensor2"])
    return add_call(node.graph, node, torch.add, call["input"], product), product


def added_where(node: fx.Node, call: Call) -> Found:
    """A sum that goes on where a condition holds."""
    more, total = call["input"], call["other"]
    added = read_call(more)
    if added is None or added.name != "add" or added.op.inplace or added["alpha"] != 1 or len(more.users) > 1:
        return None
    graded = [value.requires_grad for one in (more, *more.all_input_nodes) if (value := tensor_of(one)) is not None]
    if graded[0] != any(graded[1:]):  # (made under no_grad)
        return None
    for base, rows in ((added["input"], added["other"]), (added["other"], added["input"])):
        if base is total and isinstance(rows, fx.Node) and same_shape(shape_of(rows), shape_of(node)):
            chosen = add_call(node.graph, node, torch.where, call["condition"], rows, 0.0)
            return add_call(node.graph, node, torch.add, total, chosen), chosen
    return None


def scaled_at_last(node: fx.Node, call: Call) -> Found:
    """Rows times a column times a number."""
    product = call["input"]
    parts = scaled_rows(product) if isinstance(product, fx.Node) and len(product.users) == 1 else None
    plain = not call.op.inplace and type(call["other"]) in (int, float) and call.args.get("rounding_mode") is None
    if parts is None or not plain:
        return None
    rows = add_call(node.graph, node, torch.mul if call.name == "mul" else torch.div, parts[0], call["other"])
    return add_call(node.graph, node, torch.mul, rows, parts[1]), rows


def rows_selected(node: fx.Node, view: Call) -> Found:
    """``w.index_select(0, index.view(-1))``, viewed with the axes of index."""
    call = read_call(view["input"])
    if call is None or call.name != "index_select" or call["dim"] != 0:
        return None
    flat = read_call(call["index"])
    if flat is None or flat.name not in ("reshape", "flatten") or not is_matrices(call["input"]):
        return None
    index, own = flat["input"], shape_of(call["input"]) or ()
    whole = same_shape((*(shape_of(index) or ()), *own[1:]), shape_of(node))
    return lookup(node, call["input"], index) if whole else None


def gathered_rows(node: fx.Node, call: Call) -> Found:
    """``gather`` along the first axis, index repeated along the others."""
    if call["dim"] != 0 or not isinstance(call["index"], fx.Node) or not is_matrices(call["input"]):
        return None
    base, axes, _ = seen_as(call["index"])
    whole = same_shape((shape_of(call["index"]) or ())[1:], (shape_of(call["input"]) or ())[1:])
    return lookup(node, call["input"], base) if axes == (0, None, None) and whole else None


def one_hot_product(node: fx.Node, _: None) -> Found:
    """An einsum that adds up over the experts of one_hot(index) alone."""
    equation = equation_of(node)
    if equation is None or len(equation.operands) != 2:
        return None
    pairs = list(zip(equation.operands, equation.letters, strict=True))
    for (mask, narrow), (weight, wide) in (pairs, pairs[::-1]):
        index, expert = one_hot_of(mask), narrow[-1]
        alone = expert == wide[:1] and set(narrow) & set(wide) == {expert}
        if index is not None and alone and equation.result == narrow[:-1] + wide[1:] and is_matrices(weight):
            experts = (shape_of(mask) or (None,))[-1]
            return lookup(node, weight, index) if same_size(experts, (shape_of(weight) or (0,))[0]) else None
    return None


def one_hot_of(node: Any) -> fx.Node | None:
    """index of ``one_hot(index, E)``, cast or not."""
    call = read_call(behind(node, lambda cast: cast.name in ("cast", "type_as")))
    return call["input"] if call is not None and call.name == "one_hot" else None


def column_added(node: fx.Node, call: Call) -> Found:
    """The sum along the last axis of such a product, element by element."""
    along = call["dim"] is not None and one_of(call["dim"]) in (-1, rank_of(call["input"]) - 1)
    product = read_call(call["input"]) if along and not call["keepdim"] and call["dtype"] is None else None
    return column_picked(node, product) if product is not None and product.name == "mul" else None


def column_picked(node: fx.Node, call: Call) -> Found:
    """A product with the one_hot of a number that the program has, along the last axis."""
    if call.op.inplace:
        return None
    left, right = call["input"], call["other"]
    for table, pick in ((left, right), (right, left)) if call.name == "mul" else ((left, right),):
        number = number_of(one_hot_of(pick)) if rank_of(pick) == 1 else None
        if type(number) is int and same_shape((shape_of(table) or ())[-1:], shape_of(pick)):
            made = add_call(node.graph, node, operator.getitem, table, (..., number))
            return made, made
    return None


def number_of(node: Any) -> Any:
    """e of ``torch.tensor(e)``."""
    tensors = isinstance(node, fx.Node) and node.target in (torch.tensor, torch.as_tensor) and shape_of(node) == ()
    return node.args[0] if tensors and dtype_of(node) == torch.int64 else None


def contraction(node: fx.Node, _: None) -> Found:
    """tensordot over one axis of each."""
    dims = node.kwargs.get("dims", node.args[2] if len(node.args) > 2 else None)
    ranks = [rank_of(operand) for operand in node.args[:2]]
    pair = [one_of(dim) for dim in dims] if isinstance(dims, tuple | list) else []
    if len(pair) != 2 or not all(type(dim) is int for dim in pair) or min(ranks, default=0) < 1:
        return None
    letters = iter(string.ascii_letters)
    inner = next(letters)
    parts = [[next(letters) for _ in range(rank)] for rank in ranks]
    result = "".join(letter for part, dim in zip(parts, pair, strict=True) for letter in part if letter != part[dim])
    for part, dim in zip(parts, pair, strict=True):
        part[dim] = inner
    text = f"{''.join(parts[0])},{''.join(parts[1])}->{result}"
    made = add_call(node.graph, node, torch.einsum, text, *node.args[:2])
    return made, made


def is_matrices(node: Any) -> bool:
    return isinstance(node, fx.Node) and rank_of(node) == 3


def lookup(node: fx.Node, weight: fx.Node, index: fx.Node) -> Found:
    """``weight[index]``, where no index can be negative: this counts from the end, and what is replaced raises."""
    if (index_bounds(index) or (-1,))[0] < 0:
        return None
    made = add_call(node.graph, node, operator.getitem, weight, index)
    return made, made


# By the operator's one name, or by the function where it has none.
FORMS: dict[Any, Callable[[fx.Node, Any], Found]] = {
    "addcmul": product_added,
    "where": added_where,
    "mul": scaled_at_last,
    "div": scaled_at_last,
    "reshape": rows_selected,
    "gather": gathered_rows,
    "matmul": column_picked,
    "sum": column_added,
    torch.einsum: one_hot_product,
    torch.tensordot: contraction,
}
PIECES: dict[Any, Callable[[fx.Node], Any]] = {function_transform: without_vmap, "split": pieces_by_themselves}
