"""Zeros that an iteration adds for an expert without rows, so that its parameters get gradients: put behind the last
iteration.

    if mask.any():
        y.index_add_(0, token, expert(x[token]) * weight)
    else:
        y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())  # or y = y + expert(torch.zeros(1, d)), without biases

What is added is 0 or NaN, whatever the parameters are: added before or after the rows of other experts, it leaves the
same sum (but for the sign of a zero); rows that are *set* would lose it. So the iterations of the experts with rows
stand one after another, and are proven as if nothing stood between them; what is added for the others stays as it was
written, with its condition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage, only_computes
from moebius.lowering.contract import Work
from moebius.lowering.experts.out_of_place import alike
from moebius.lowering.experts.unrolled_loops import (
    accumulates,
    added_rows,
    adds_to_rows,
    chased,
    is_branch,
    place_of,
)
from moebius.lowering.memo import MEMO
from moebius.lowering.operators import ELEMENTWISE, Call, call_name, given_to, loop_body, read_call
from moebius.lowering.values import apply, certain

# What gives zero (or NaN) for zeros: of its first argument, or of all.
ZERO_AT_ZERO = frozenset(
    {"cast", "getitem", "sum", "reshape", "neg", "expand", "squeeze", "unsqueeze", "flatten", "mean", "clone",
     "type_as", "contiguous", "detach", "select", "div", "linear", "permute", "transpose", "t", "chunk"}
)  # fmt: skip


def postpone_zeros(work: Work) -> None:
    """Moves each such addition behind the accumulations that follow it."""
    storage: Storage | None = None
    for node in work.gm.graph.nodes:
        is_zero(node)  # once of each, from the first on: a long sum is asked about no deeper than its last addition
    for node in list(reversed(work.gm.graph.nodes)):
        base = sum_of(node)
        if base is None:
            continue
        storage = storage or Storage(work.gm.graph)
        move(node, base, storage)


def sum_of(node: fx.Node) -> fx.Node | None:
    """The tensor to which a node adds zeros, and does nothing else."""
    if is_branch(node):
        return sum_of_branch(node)
    call = read_call(node)
    if call is None or not isinstance(node.args[0] if node.args else None, fx.Node):
        return None
    return added_to(node)


def sum_of_branch(node: fx.Node) -> fx.Node | None:
    call = certain(read_call(node))
    body = loop_body(node).graph
    adds = [(n, base) for n in body.nodes if (base := added_to(n)) is not None and base.op == "placeholder"]
    if len(adds) != 1:
        return None
    ((add, base),) = adds
    near = [add, *add.all_input_nodes, *(n for one in add.all_input_nodes for n in one.all_input_nodes)]
    reads = {n for n in near if call_name(n) in ("getitem", "add")}
    if not set(base.users) <= reads | {add}:
        return None
    results: Any = body.output_node().args[0]
    written = certain(read_call(add))
    if list(results) != ([] if written.op.inplace else [add]) or len(call["carried"]) != len(results):
        return None
    for inner in body.nodes:
        plain = inner.op in ("placeholder", "output") or call_name(inner) == "skip_iteration"
        if not (plain or inner in reads or inner is add or adds_to_rows(inner) or only_computes(inner)):
            return None
    found = given_to(node)[base]
    return found if isinstance(found, fx.Node) else None


def added_to(node: fx.Node) -> fx.Node | None:
    """What ``node`` adds zeros to, or to a part of: ``y + zeros``, ``y += zeros``, ``y[0] += zeros``."""
    call = read_call(node)
    if call is None:
        return None
    if call.name == "add" and call["alpha"] == 1:
        base = call["input"] if is_zero(call["other"]) else call["other"] if is_zero(call["input"]) else None
        part = read_call(base)
        if call.op.inplace and (base is not call["input"] or part is not None and part.name == "getitem"):
            return None  # of a part: its setitem tells
        return base if isinstance(base, fx.Node) and (call.op.inplace or alike(base, node)) else None
    value = added_rows(node)
    added = read_call(value) if value is not None else None
    if added is None or added["alpha"] != 1 or not is_zero(added["other"]):
        return None
    taken = certain(read_call(added["input"]))
    return taken["input"] if taken["index"] == node.args[1] else None


def is_zero(value: Any) -> bool:
    """Whether a value is zero or NaN, whatever the tensors are that it is computed of."""
    call = read_call(value)
    if call is None or call.op.inplace:
        return False
    known = {} if MEMO.known is None else MEMO.known.zeros
    found = known.get(value)
    if found is None or found[0] is not call:
        found = known[value] = call, makes_zero(call)
    return found[1]


def makes_zero(call: Call) -> bool:
    if call.name == "mul" and any(type(call[side]) in (int, float) and call[side] == 0 for side in ("input", "other")):
        return True
    if call.name == "add":
        return all(is_zero(call[side]) for side in ("input", "other"))
    if call.name in ("mul", "matmul"):
        return is_zero(call["input"]) or is_zero(call["other"])
    if call.name == "zeros":
        return not any(one is not None and one.op.inplace for one in map(read_call, call.node.users))
    if call.name == "linear" and call["bias"] is not None:
        return False
    known = call.name in ZERO_AT_ZERO or (call.name in ELEMENTWISE and is_zero_at_zero(call.node))
    return known and is_zero(call.args.get("input"))


def is_zero_at_zero(node: fx.Node) -> bool:
    """Whether an elementwise function of one tensor, and else of numbers, gives zero for zero."""
    if len(node.all_input_nodes) != 1:
        return False
    zero = torch.zeros(1, dtype=torch.float32, device="cpu")
    given: Any = [fx.map_arg(part, lambda _: zero) for part in (node.args, node.kwargs)]
    return not apply(node, *given).any()


def move(node: fx.Node, base: fx.Node, storage: Storage) -> None:
    """Puts the addition behind the last accumulation into the same sum that comes before anybody else reads it."""
    result = result_of(node)
    sums = {base} if result is None else {base, result}  # the sum, by every name
    last, names = None, set[fx.Node]()
    for later in following(node):
        if later in sums or not any(storage.share(one, name) for one in later.all_input_nodes for name in sums):
            continue
        zeros, place = sum_of(later), place_of(later)
        adds = place is not None and zeros is None and accumulates(place.inner)
        if place is not None and adds and (place.base in sums or chased(place.base) in sums):
            last = later
        elif zeros not in sums:
            break
        sums.update(one for one in (later, result_of(later)) if one is not None and not is_branch(one))
        names = set(sums) if last is later else names
    operands = [one for one in node.all_input_nodes if one is not base]
    if last is None or any(storage.share(one, base) for one in operands) or is_written(operands, node, last, storage):
        return
    if result is None:
        last.append(node)
    else:
        move_result(node, base, result, last, names, storage)


def move_result(
    node: fx.Node, base: fx.Node, result: fx.Node, last: fx.Node, names: set[fx.Node], storage: Storage
) -> None:
    """One that gives a new sum: the iterations behind it add to the old one, and it is made of what they leave."""
    if not starts_as_zeros(base) or any(node < user for user in base.users if user is not result):
        return  # somebody has kept the old sum, or reads it
    readers = [user for user in following(last) if not names.isdisjoint(user.all_input_nodes) and user not in names]
    left = {one for user in readers for one in user.all_input_nodes if one in names}
    if len(left) != 1:
        return
    (final,) = left
    result.replace_all_uses_with(base)
    final = base if final is result else final
    (final if last < final else last).append(node)
    if result is not node:
        node.append(result)
        result.args = (node, 0)
    node.replace_input_with(base, final)
    for user in readers:
        user.replace_input_with(final, result)
    for one in (node, result):
        storage.put(one, storage.roots[one] | storage.roots[base] | storage.roots[final])


def starts_as_zeros(node: fx.Node) -> bool:
    """Whether a sum is one of zeros and what was accumulated into it: no operator has kept it for backward."""
    while True:
        node = chased(node)
        call = read_call(node)
        if call is None:
            return False
        if call.name == "zeros":
            return True
        made = call["input"] if call.name == "getitem" and call["index"] == 0 else node
        if not isinstance(made, fx.Node) or (base := base_of(made)) is None:
            return False
        node = base


def base_of(node: fx.Node) -> fx.Node | None:
    """What an accumulation or an addition of zeros adds to."""
    place = place_of(node)
    return sum_of(node) if place is None else place.base


def result_of(node: fx.Node) -> fx.Node | None:
    """The new sum that a node gives; None where it writes in place."""
    call = read_call(node)
    if call is None or call.op.inplace:
        return None
    if not is_branch(node):
        return node
    return next((user for user in node.users if user.target is operator.getitem), None)


def is_written(operands: list[fx.Node], node: fx.Node, last: fx.Node, storage: Storage) -> bool:
    """Whether something between the two writes into one of the operands."""
    return any(not last < writer for writer in storage.writers_of(operands, node))


def following(node: fx.Node) -> Iterator[fx.Node]:
    while (node := node.next).op != "root":
        yield node
