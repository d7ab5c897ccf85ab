"""Numbers between which a branch on values decides: ``best = loss if loss < best else best``.

Each side leaves a number that was there before the branch, or a constant: which of the two it is then is one node
behind the branch. What a side computes of numbers belongs to its body, and stays there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step import chosen

from ..tensors.arrays import ArrayNumber
from ..values.numbers import Number, number_kind
from ..values.numpy_numbers import NUMPY_FLOATS
from ..values.values import TensorProxy
from .branches import Conditional
from .loop_regions import LoopRegion

if TYPE_CHECKING:
    from ..tensors.tensors import TensorOperations

KINDS = NUMPY_FLOATS | {float}


def is_left(loop: LoopRegion, place: Any, pair: tuple[Any, Any], tensors: TensorOperations) -> bool:
    """A branch is recorded. place: the position of a local, inverted of a value on the stack, or a place of the heap.
    pair: what this side leaves there, and what the other one did, or nobody. Notes the two, if they are floats of one
    type that stand in front of the branch."""
    if loop.first is None and (loop.skips or is_kind(loop.begun_with[-1], TensorProxy)):
        return False  # (a tensor that was asked may have been written into by then)
    graph = outer(tensors)
    if number_kind(pair[0]) is not number_kind(pair[1]) or not all(is_of(value, graph) for value in pair):
        return False
    loop.chosen[place] = pair
    return True


def is_of(value: Any, graph: fx.Graph) -> bool:
    """Whether it is a float that the graph has, or a constant."""
    if type(value) is Number:
        return value.kind in KINDS and value.node is not None and value.node.graph is graph
    return type(value) in KINDS


def others(loop: LoopRegion, changed: list[int], tensors: TensorOperations) -> list[int]:
    """The locals that the one side has changed, without such numbers."""
    locals_, before = loop.frame.locals, loop.before
    return [i for i in changed if not is_left(loop, i, (locals_[i], before[i]), tensors)]


def outer(tensors: TensorOperations) -> fx.Graph:
    """The graph that the branch stands in, whose body is open."""
    scope = tensors.writer.scope.parent
    assert scope is not None
    graph: fx.Graph = scope.graph
    return graph


def hand_out(loop: LoopRegion, tensors: TensorOperations) -> None:
    """A node for each number, behind the branch; its value goes where it belongs."""
    rows, frame, condition = loop.rows, loop.frame, loop.begun_with[-1] if loop.chosen else None
    condition = condition.value if type(condition) is ArrayNumber else condition
    for place, (mine, other) in loop.chosen.items():
        sides = (other, mine) if cast(Conditional, rows).skip_if else (mine, other)
        node = tensors.writer.node("call_function", chosen, (condition, *sides), {})
        node.meta["val"] = None
        number = Number(tensors.numbers, number_kind(mine)(0.5), node)
        if type(place) is not int:
            place.put(number)
        elif place >= 0:
            frame.locals[place] = number
        else:
            frame.stack[~place] = number
