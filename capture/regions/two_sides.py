"""``if … else …`` on values: the side that the jump passes over is recorded as a branch, then the other as one on the
opposite condition. What both sides set is the first one's where that ran, else the second one's.

A local that was not set before, or was something else, has no value to begin with: the first branch is given None for
it, which nobody sees, as one of the two runs. So it is for the value of ``a if … else b``, which lies on the stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..values.values import Break, TensorProxy
from .branches import OneTurn, is_read_from
from .open_loops import FirstSide, Joined, OpenLoop

if TYPE_CHECKING:
    from ..tensors.tensors import TensorOperations

EXPRESSION = -1  # in the place of a local's index: the value on the stack
PLAIN = (int, str, bool, bytes, type(None))


def is_double(loop: OpenLoop) -> bool:
    """Whether the loop is one side of two."""
    return isinstance(loop.rows, OneTurn) and (loop.rows.other is not None or loop.first is not None)


def take_expression(loop: OpenLoop) -> Any:
    """The value that a side of two leaves on the stack, or None."""
    stack = loop.frame.stack
    return stack.pop() if is_double(loop) and len(stack) == len(loop.stack) + 1 else None


def own_condition(tensors: TensorOperations, condition: Any) -> Any:
    """For the second side, as the first may write into the tensor that was asked."""
    return tensors.function(torch.clone, (condition,), {}) if isinstance(condition, TensorProxy) else condition


def leave_first(loop: OpenLoop, changed: list[int], expression: Any) -> FirstSide:
    """The first side is recorded: what it gives out, apart from what it changed of what was there before."""
    side, frame = FirstSide(), loop.frame
    values = {index: frame.locals[index] for index in changed}
    if expression is not None:
        values[EXPRESSION] = expression
    names = frame.program.localsplus
    for index, value in values.items():
        wanted = index == EXPRESSION or is_read_from(frame, loop.head, names[index])
        if wanted and isinstance(value, TensorProxy) and not loop.skips:
            side.joined[index] = value
            loop.joined.append(Joined(index, value, None))
        else:
            side.left[index] = value
    return side


def leave_second(loop: OpenLoop, first: FirstSide, expression: Any, alike: Any) -> list[int]:
    """The second side is recorded: joins what both give. Returns the locals of which it cannot be said what they are
    then."""
    frame, unsure = loop.frame, []
    for index, mine in first.joined.items():
        now = expression if index == EXPRESSION else frame.locals[index]
        if alike(mine, now) and not loop.skips:
            loop.joined.append(Joined(index, now, mine))
        else:
            unsure.append(index)
    for index, mine in first.left.items():
        now = expression if index == EXPRESSION else frame.locals[index]
        if not (now is mine or (type(now) is type(mine) and type(now) in PLAIN and now == mine)):
            unsure.append(index)
        elif index == EXPRESSION:
            frame.stack.append(now)
    one_alone = (expression is None) != (EXPRESSION not in {*first.joined, *first.left})
    if EXPRESSION in unsure or one_alone:
        raise Break("data-dependent branch", "the value of an expression depends on a condition on values",
                    "use torch.where, or move it out of the captured step")  # fmt: skip
    return unsure


def given(loop: OpenLoop, argument: Any) -> list[Any]:
    """What the branch's node is given for what it gives out."""
    return [None if one.initial is None else argument(one.initial) for one in loop.joined]


def hand_out(loop: OpenLoop, found: list[Any], first: FirstSide | None) -> None:
    """The values after the branch go where they belong; the first side's into the record of it."""
    for one, value in zip(loop.joined, found, strict=True):
        if first is not None:
            first.joined[one.index] = value
        elif one.index == EXPRESSION:
            loop.frame.stack.append(value)
        else:
            loop.frame.locals[one.index] = value


def placeholders(loop: OpenLoop, scope: Any) -> list[fx.Node]:
    made = []
    for one in loop.joined:
        node = scope.placeholder("other")
        node.meta.update(val=None if one.initial is None else one.initial.fake)
        node.meta.update(where=loop.where[-1] if loop.where else ("", 0, ""), stack=loop.where)
        made.append(node)
    return made
