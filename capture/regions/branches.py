"""Which ``if`` on values is recorded as a loop of one turn, or as two: one whose sides go on behind it.

``if mask.any(): …`` in the turn of an unrolled loop, or ``if count == 0: continue`` there. The test reads the bytecode
only; that the body changes nothing but tensors and the function's locals is seen when it is interpreted.
"""

from __future__ import annotations

import dis
from typing import Any

from torch import fx

from moebius.interpreter import Frame

from ..bytecode.copied_returns import copies, start_of_copy
from ..bytecode.liveness import accesses
from ..torch_facts import torch_private
from ..values.values import SYMBOLIC, TensorProxy

# Branches, and the truth of the condition on which they jump.
BRANCHES = {
    "POP_JUMP_IF_TRUE": True,
    "POP_JUMP_IF_FALSE": False,
    "POP_JUMP_FORWARD_IF_TRUE": True,
    "POP_JUMP_FORWARD_IF_FALSE": False,
    "POP_JUMP_BACKWARD_IF_TRUE": True,
    "POP_JUMP_BACKWARD_IF_FALSE": False,
}
PASSING = frozenset(
    {"NOP", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RESUME", "JUMP", "NOT_TAKEN"}
)
ALWAYS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP"})
LEAVING = ("RETURN_", "RAISE_", "RERAISE", "YIELD_", "SEND", "INTERPRETER_EXIT")


# What may ask for the truth before the jump does, and how many values it takes: 3.13's jumps take True and False alone.
ASKING = {"TO_BOOL": 1, "COMPARE_OP": 2} if "TO_BOOL" in dis.opmap else {}


class OneTurn:
    """What stands for the rows of a recorded branch. here: its index. entry, inside: where its body begins, and the
    indices of it.

    end: where both sides meet. skip_if: for which truth of the condition the body does not run. other: ``else``.
    """

    count = 1

    def __init__(
        self, here: int, entry: int, inside: range, end: int, skip_if: bool, other: OneTurn | None = None
    ) -> None:
        self.here, self.entry, self.inside, self.end, self.skip_if = here, entry, inside, end, skip_if
        self.other = other


def past_jumps(frame: Frame, index: int) -> int:
    """Where an instruction that does nothing but jump leads to, or a copy; the index itself for any other."""
    instructions, known = frame.program.instructions, copies(frame.program)
    for _ in range(len(instructions)):
        instruction = instructions[index]
        if index in known:
            index = known[index]
        elif instruction.opname not in PASSING:
            break
        else:
            index = instruction.target if instruction.target is not None else index + 1
    return index


def asks_for_jump(instructions: Any, index: int) -> int:
    """How many values an instruction takes if it asks for the truth on which the next one jumps; else 0."""
    count = ASKING.get(instructions[index].opname, 0)
    return count if count and instructions[index + 1].opname in BRANCHES else 0


def branch_at(frame: Frame) -> OneTurn | None:
    """The branch at the frame's instruction, if it has one body and both sides meet behind it."""
    instructions, here = frame.program.instructions, frame.pc
    target = instructions[here].target
    jumps_if = BRANCHES[instructions[here].opname]
    assert target is not None
    sides = ((here + 1, past_jumps(frame, target), jumps_if), (target, past_jumps(frame, here + 1), not jumps_if))
    for entry, end, skip_if in sides:
        if end == past_jumps(frame, entry):
            continue  # an empty body
        inside = range(entry, end) if end > entry else range(entry, loop_end(frame, end))
        if len(inside) and here not in inside and all(stays(frame, index, inside, end) for index in inside):
            return OneTurn(here, entry, inside, end, skip_if)
    return with_else(frame, target, jumps_if)


def with_else(frame: Frame, target: int, jumps_if: bool) -> OneTurn | None:
    """The branch at the frame's instruction, if the side that its jump passes over ends in a jump to where both
    meet, or in a copy of what stands there."""
    instructions, here, last = frame.program.instructions, frame.pc, target - 1
    if last <= here:
        return None
    if last in copies(frame.program):
        last = start_of_copy(frame.program, last)
    elif instructions[last].opname not in ALWAYS:
        return None
    end = past_jumps(frame, last)
    first, second = range(here + 1, target), range(target, end if end > here else loop_end(frame, end))
    if here in second or not second or not all(stays(frame, i, side, end) for side in (first, second) for i in side):
        return None
    other = OneTurn(here, target, second, end, not jumps_if)
    return OneTurn(here, here + 1, first, end, jumps_if, other)


def loop_end(frame: Frame, head: int) -> int:
    """Where the body of the loop ends whose turns begin at ``head``: FOR_ITER, or a while loop's condition."""
    instructions = frame.program.instructions
    if instructions[head].opname == "FOR_ITER":
        return instructions[head].target or head
    return max((i + 1 for i in range(head, len(instructions)) if instructions[i].target == head), default=head)


def stays(frame: Frame, index: int, inside: range, end: int) -> bool:
    """Whether the instruction leads on within the body, or to where the sides meet."""
    instruction, known = frame.program.instructions[index], copies(frame.program)
    if index in known:  # it runs there
        return known[index] in inside or past_jumps(frame, start_of_copy(frame.program, index)) == end
    if instruction.opname.startswith(LEAVING):
        return False
    target = instruction.target
    return target is None or target in inside or past_jumps(frame, target) == end


def is_read_from(frame: Frame, index: int, name: str) -> bool:
    """Whether some way from the instruction reads (or deletes) the local before it is set."""
    program = frame.program
    seen: set[int] = set()
    work = [index]
    while work:
        here = work.pop()
        if here in seen or here >= len(program.instructions):
            continue
        seen.add(here)
        instruction = program.instructions[here]
        handler = program.handler_at(here)
        if handler is not None:
            work.append(handler[0])
        first = next((kind for kind, accessed in accesses(instruction) if accessed == name), None)
        if first == "STORE":
            continue
        if first is not None:
            return True
        if instruction.target is not None:
            work.append(instruction.target)
        if not instruction.opname.startswith(LEAVING) and instruction.opname not in ALWAYS:
            work.append(here + 1)
    return False


def is_of_row(condition: Any, row: fx.Node) -> bool:
    """Whether a condition asks for nothing but the number of this turn's expert."""
    if isinstance(condition, TensorProxy):
        return of_row(condition.node, row)
    symbols = set(torch_private.free_unbacked_symbols(condition)) if isinstance(condition, SYMBOLIC) else set()
    read = [node for node in row.graph.nodes if node.target == "item" and of_row(node, row)]
    return bool(symbols) and symbols <= {torch_private.expression(node.meta["val"]) for node in read}


def of_row(node: fx.Node, row: fx.Node) -> bool:
    """Whether a node is computed of the row alone."""
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node is row
