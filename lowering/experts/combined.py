"""Every expert's rows in one stack, and what is made of it: which weighted sum of them a product or a lookup is.

    y = torch.stack([expert(x) for expert in experts], 1)                  [T, E, D]; the axes in any order
    (y * gates[:, :, None]).sum(1)    einsum("ted,te->td", y, gates)    torch.bmm(gates[:, None], y)[:, 0]

or, of what is picked of the stack by index [T, K] (``gather``, ``take_along_dim``, ``y[arange(T)[:, None], index]``),
the same sum with weights [T, K]. T may be several axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.routing import chosen_from, index_root
from moebius.lowering.experts.views import FULL, equation_of, seen_as
from moebius.lowering.experts.zeros import one_of
from moebius.lowering.operators import read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import rank_of, same_shape, shape_of

ADDING = frozenset({torch.baddbmm, "baddbmm"})  # products that add something
TOKENS = "tuv"  # letters of the tokens' axes


@dataclass(frozen=True)
class Combined:
    """Σ_e rows[e] · weight[:, e], or with index [T, K], Σ_k rows[index[:, k]] · weight[:, k]; weight None: Σ_e rows[e].

    between: what lies between the rows and the sum, and must be as it was made."""

    rows: list[fx.Node]
    weight: fx.Node | None
    index: fx.Node | None
    between: tuple[fx.Node, ...]

    def writer(self, storage: Storage, end: fx.Node) -> fx.Node | None:
        """What writes into one of these before the sum is made."""
        picked = () if self.index is None else (self.index, index_root(self.index), chosen_from(self.index))
        return storage.writer_into((*self.between, *self.rows, *picked), end)


@dataclass(frozen=True)
class Stack:
    """The rows [T, D] of each expert in one tensor. letters: t (u, v): tokens, n: experts (of an index, slots), d."""

    rows: list[fx.Node]
    letters: str
    index: fx.Node | None
    between: tuple[fx.Node, ...]

    @property
    def tokens(self) -> str:
        return TOKENS[: len(self.letters) - 2]

    @property
    def place(self) -> dict[str, int]:
        """Which axis of weights or of an index [T, K] each letter is."""
        return {letter: i for i, letter in enumerate(self.tokens + "n")}

    def is_summed(self, dim: int) -> bool:
        """Whether a sum along this axis leaves the tokens' rows."""
        summed = self.letters[dim % len(self.letters)] == "n"
        return summed and self.letters.replace("n", "") == self.tokens + "d"


# ----------------------------------------------------------------------------------------------------------------------
# The stack, and what is picked of it
# ----------------------------------------------------------------------------------------------------------------------


def stack_of(node: fx.Node) -> Stack | None:
    base, axes, views = seen_as(node)
    found = made_stack(base) or picked(base)
    if found is None or None in axes:
        return None
    letters = "".join(found.letters[axis] for axis in axes if axis is not None)
    return Stack(found.rows, letters, found.index, (*found.between, *views))


def made_stack(node: fx.Node) -> Stack | None:
    """``torch.stack(rows, dim)``, or ``torch.cat`` of rows with an axis of size 1 there, or side by side and apart
    again: ``torch.cat(rows, -1).view(-1, E, D)``."""
    call = read_call(node)
    joined = read_call(call["input"]) if call is not None and call.name == "reshape" else call
    if joined is None or joined.name not in ("stack", "cat"):
        return None
    rows, dim, shape = joined["tensors"], joined["dim"], shape_of(node) or ()
    if joined is not call:
        apart = len(shape) == 3 and dim in (-1, 1) and isinstance(rows, tuple | list) and same_size(shape[1], len(rows))
        if joined.name == "stack" or not apart or not all(same_shape(shape_of(r), (shape[0], shape[2])) for r in rows):
            return None
        return Stack(list(rows), "tnd", None, (joined.node, node))
    views: tuple[fx.Node, ...] = ()
    if joined.name == "cat":
        parts, rows = rows, []
        for part in parts if isinstance(parts, tuple | list) else ():
            base, axes, own = seen_as(part) if isinstance(part, fx.Node) else (None, (), ())
            if not isinstance(dim, int) or len(axes) < 3:
                return None
            plain, place = tuple(range(len(axes) - 1)), dim % len(axes)
            if axes != (*plain[:place], None, *plain[place:]):
                return None
            rows.append(base)
            views += own
    if not isinstance(rows, tuple | list) or len(rows) < 2 or not isinstance(dim, int):
        return None
    rank = rank_of(rows[0])
    flat = [row for row in rows if isinstance(row, fx.Node) and rank_of(row) == rank]
    if len(flat) < len(rows) or not 2 <= rank <= len(TOKENS) + 1:
        return None
    whole, place = TOKENS[: rank - 1] + "d", dim % (rank + 1)
    return Stack(flat, whole[:place] + "n" + whole[place:], None, (*views, node))


def picked(node: fx.Node) -> Stack | None:
    """Rows of the stack chosen by index [T, K]."""
    call = read_call(node)
    if call is None or call.op.inplace:
        return None
    if call.name == "take_along_dim":
        return along(node, call["input"], call["dim"], call["indices"], repeated=False)
    if call.name == "gather":
        return along(node, call["input"], call["dim"], call["index"], repeated=True)
    if call.name == "getitem" and isinstance(call["index"], tuple) and len(call["index"]) == 2:
        return looked_up(node, call["input"], call["index"], 2)
    return None


def along(node: fx.Node, source: Any, dim: Any, index: Any, repeated: bool) -> Stack | None:
    """gather, whose index is repeated for each feature, or take_along_dim, which does that itself."""
    stack = stack_of(source) if isinstance(source, fx.Node) else None
    if stack is None or stack.index is not None or not isinstance(dim, int) or not isinstance(index, fx.Node):
        return None
    base, axes, views = seen_as(index)
    if len(axes) != len(stack.letters) or stack.letters[dim % len(axes)] != "n":
        return None
    wanted = tuple(stack.place.get(letter) for letter in stack.letters)
    if rank_of(base) == len(stack.tokens):  # one expert for each token
        wanted = tuple(None if letter == "n" else axis for letter, axis in zip(stack.letters, wanted, strict=True))
    if axes != wanted:
        return None
    feature, own, whole = stack.letters.index("d"), shape_of(index), shape_of(source)
    if own is None or whole is None or not (same_size(own[feature], whole[feature]) or not repeated):
        return None
    return Stack(stack.rows, stack.letters, base, (*stack.between, *views, node))


def looked_up(node: fx.Node, source: Any, keys: tuple, rank: int) -> Stack | None:
    """``stack[arange(T)[:, None], index]`` of [T, E, D]; the keys the other way round of [E, T, D]. rank: the index's;
    1 for one expert of each token, ``stack[arange(T), index]``, which drops the axis of experts."""
    stack = stack_of(source) if isinstance(source, fx.Node) else None
    if stack is None or stack.index is not None or stack.letters not in ("tnd", "ntd"):
        return None
    tokens, index = keys if stack.letters == "tnd" else keys[::-1]
    shape = shape_of(index) if isinstance(index, fx.Node) else None
    if not isinstance(tokens, fx.Node) or shape is None or len(shape) != rank:
        return None
    base, axes, views = seen_as(tokens)
    call = read_call(base)
    if axes != (0, None)[:rank] or call is None or call.name != "arange" or len(call["bounds"]) != 1:
        return None
    if not same_size((shape_of(base) or (None,))[0], shape[0]):
        return None
    return Stack(stack.rows, "tnd", index, (*stack.between, *views, base, node))


# ----------------------------------------------------------------------------------------------------------------------
# The sum
# ----------------------------------------------------------------------------------------------------------------------


def combination(node: fx.Node) -> Combined | None:
    """The weighted sum of the experts' rows that a node is, if it is one: [T, D]."""
    return summed(node) or by_product(node) or one_of_each(node)


def pair(stack: Stack | None, weight: Any, letters: str, between: tuple[fx.Node, ...]) -> Combined | None:
    """letters: of the weight's axes, as those of the stack."""
    if stack is None or not isinstance(weight, fx.Node):
        return None
    base, axes, views = seen_as(weight)
    shape = shape_of(base)
    if len(axes) != len(letters) or shape is None or len(shape) != len(stack.place):
        return None
    if stack.index is not None and rank_of(stack.index) != len(shape):
        return None
    if any(axis != stack.place.get(letter) for axis, letter in zip(axes, letters, strict=True)):
        return None
    return Combined(stack.rows, base, stack.index, (*stack.between, *views, *between))


def summed(node: fx.Node) -> Combined | None:
    """``(stack * gates[:, :, None]).sum(1)``."""
    call = read_call(node)
    if call is None or call.name != "sum" or call["keepdim"] is not False or call.args.get("dtype") is not None:
        return None
    dim = one_of(call["dim"])
    product = read_call(call["input"])
    whole = stack_of(call["input"]) if isinstance(dim, int) and isinstance(call["input"], fx.Node) else None
    if whole is not None and whole.index is None and whole.letters[dim % len(whole.letters)] == "n":
        return Combined(whole.rows, None, None, whole.between) if whole.is_summed(dim) else None
    if not isinstance(dim, int) or product is None or product.name != "mul" or product.op.inplace:
        return None
    for one, other in product.either_way:
        stack = stack_of(one) if isinstance(one, fx.Node) and rank_of(one) > 2 else None
        if stack is not None and stack.is_summed(dim):
            found = pair(stack, other, stack.letters, (product.node,))
            if found is not None:
                return found
    return None


def one_of_each(node: fx.Node) -> Combined | None:
    """``stack.gather(1, index.view(-1, 1, 1).expand(-1, 1, D)).squeeze(1)``: the rows of each token's only expert; as
    ``stack[arange(T), index]``."""
    call = read_call(node)
    source = call.args.get("input") if call is not None and not call.op.inplace else None
    keys = call["index"] if call is not None and call.name == "getitem" else None
    if isinstance(keys, tuple) and len(keys) == 2 and (one := looked_up(node, source, keys, 1)) is not None:
        return Combined(one.rows, None, one.index, one.between)
    dim = dropped_axis(call.name, call.args) if call is not None and isinstance(source, fx.Node) else None
    stack = stack_of(source) if isinstance(source, fx.Node) and dim is not None else None
    if stack is None or stack.index is None or dim is None or not stack.is_summed(dim):
        return None
    shape = shape_of(stack.index) or ()
    single = len(shape) == len(stack.tokens) or same_size(shape[-1], 1)
    return Combined(stack.rows, None, stack.index, stack.between) if single else None


def by_product(node: fx.Node) -> Combined | None:
    """``einsum("ted,te->td", stack, gates)``; ``torch.bmm(gates[:, None], stack)[:, 0]``, or ``.squeeze(1)``."""
    call = read_call(node)
    product = call.args.get("input") if call is not None and not call.op.inplace else None
    dropped = dropped_axis(call.name, call.args) if call is not None and isinstance(product, fx.Node) else None
    made: fx.Node = product if product is not None and dropped is not None else node
    found = None if made.target in ADDING else equation_of(made)
    if found is None or len(found.operands) != 2:
        return None
    alone = "" if dropped is None else found.result[dropped]  # an axis of size 1, or of which the first is taken
    result = found.result.replace(alone, "")
    pairs = list(zip(found.operands, found.letters, strict=True))
    for (one, wide), (other, narrow) in (pairs, pairs[::-1]):
        stack = stack_of(one) if len(wide) > 2 else None
        if stack is None or len(stack.letters) != len(wide) or not set(narrow) - set(wide) <= set(alone):
            continue
        names = dict(zip(wide, stack.letters, strict=True))
        if names.keys().isdisjoint(alone) and "".join(names.get(a, "?") for a in result) == stack.tokens + "d":
            return pair(stack, other, "".join(names.get(letter, "1") for letter in narrow), (made,))
    return None


def dropped_axis(name: str, given: dict[str, Any]) -> int | None:
    """Which axis, of size 1, ``squeeze`` or a zero in an index takes away."""
    if name == "squeeze" and isinstance(given["dim"], int):
        return int(given["dim"])
    if name == "select" and given["index"] == 0 and isinstance(given["dim"], int):
        return int(given["dim"])
    if name == "getitem" and isinstance(given["index"], tuple):
        keys = given["index"]
        zeros = [i for i, key in enumerate(keys) if type(key) is int and key == 0]
        plain = all(type(key) is int or (isinstance(key, slice) and key == FULL) for key in keys)
        return zeros[0] if plain and len(zeros) == 1 else None
    return None
