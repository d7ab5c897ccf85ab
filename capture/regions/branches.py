"""Which ``if`` on values is recorded as a loop of one iteration, or as two: one whose sides go on behind it.

``if mask.any(): …`` in the iteration of an unrolled loop, or ``if count == 0: continue`` there. The test reads the
bytecode only; that the body changes nothing but tensors and the function's locals is seen when it is interpreted.
"""

from __future__ import annotations

import dis
from typing import Any

import torch
from torch import fx

from moebius.interpreter import UNSET, Frame, is_kind
from moebius.interpreter.program import Program
from moebius.lowering import only_computes

from ..bytecode.copied_returns import RETURNS
from ..bytecode.counting import Counter, Part
from ..bytecode.flow import RETURNED, behind, joins, last_copy, side
from ..tensors.fakes import leaves
from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import SYMBOLIC, Break, TensorProxy

# Branches, and the truth of the condition on which they jump.
BRANCHES = {
    "POP_JUMP_IF_TRUE": True,
    "POP_JUMP_IF_FALSE": False,
    "POP_JUMP_FORWARD_IF_TRUE": True,
    "POP_JUMP_FORWARD_IF_FALSE": False,
    "POP_JUMP_BACKWARD_IF_TRUE": True,
    "POP_JUMP_BACKWARD_IF_FALSE": False,
}
# Those that leave the condition as an expression's value where they jump (``a or b`` up to 3.11; later ones jump on a
# copy of it).
VALUED = {"JUMP_IF_TRUE_OR_POP": True, "JUMP_IF_FALSE_OR_POP": False}
PASSING = frozenset(
    {"NOP", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RESUME", "JUMP", "NOT_TAKEN"}
)
LEAVING = ("RETURN_", "RAISE_", "RERAISE", "YIELD_", "SEND", "INTERPRETER_EXIT")


# What may ask for the truth before the jump does, and how many values it takes: 3.13's jumps take True and False alone.
ASKING = {"TO_BOOL": 1, "COMPARE_OP": 2} if "TO_BOOL" in dis.opmap else {}
WATCHED = frozenset((*BRANCHES, *VALUED, *ASKING, "FOR_ITER"))  # where no loop is open, one may be begun at these alone


class Conditional:
    """What stands for the rows of a recorded branch. here: its index. entry, inside: where its body begins, and the
    indices of it.

    end: where both sides meet, RETURNED for the function's return. skip_if: for which truth of the condition the body
    does not run. given: whether the condition is on the stack as its body begins: the value of ``a or b``. below:
    whether that lay under the one that the jump took. other: ``else``.
    """

    count = 1

    def __init__(
        self, here: int, entry: int, inside: frozenset[int], end: int, skip_if: bool, given: bool, below: bool
    ) -> None:
        self.here, self.entry, self.inside, self.end, self.skip_if = here, entry, inside, end, skip_if
        self.given, self.below = given, below
        self.other: Conditional | None = None


def past_jumps(frame: Frame, index: int) -> int:
    """Where an instruction that does nothing but jump leads to, or a copy; the index itself for any other."""
    instructions = frame.program.instructions
    for _ in range(len(instructions)):
        index = last_copy(frame.program, index)
        if index == RETURNED or instructions[index].opname not in PASSING:
            break
        (index,) = behind(frame.program, index)
    return index


def way_of(frame: Frame, here: int, truth: bool) -> int:
    """Where the branch there goes on for this truth of its condition."""
    instruction = frame.program.instructions[here]
    jumps_if = BRANCHES[instruction.opname] if instruction.opname in BRANCHES else VALUED[instruction.opname]
    assert instruction.target is not None
    return instruction.target if truth == jumps_if else here + 1


def count_jumps(counter: Counter, frame: Frame, here: int, truth: bool, end: int, part: Part) -> None:
    """The jumps that lead from a branch to where its sides meet run as often as this part of a body."""
    program, index = frame.program, way_of(frame, here, truth)
    while last_copy(program, index) != end and program.instructions[index].opname in PASSING:
        counter.step(frame.code, program.instructions[index].offset, 1, part)
        (index,) = behind(program, index)


def count_empty_sides(counter: Counter, loop: Any) -> None:
    """Of a branch whose body is entered: what runs on a side on which nothing is done."""
    rows = loop.rows
    if not rows.inside:
        count_jumps(counter, loop.frame, rows.here, not rows.skip_if, rows.end, loop.part)
    if rows.other is None and loop.first is None:
        count_jumps(counter, loop.frame, rows.here, rows.skip_if, rows.end, loop.skipped)


def asks_for_jump(instructions: Any, index: int) -> int:
    """How many values an instruction takes if it asks for the truth on which the next one jumps; else 0."""
    count = ASKING.get(instructions[index].opname, 0)
    return count if count and instructions[index + 1].opname in BRANCHES else 0


def branch_at(frame: Frame) -> Conditional | None:
    """The branch at the frame's instruction, if both of its sides lead to one place; one of them may be empty."""
    program, here = frame.program, frame.pc
    target, opname = program.instructions[here].target, program.instructions[here].opname
    jumps_if = BRANCHES[opname] if opname in BRANCHES else VALUED[opname]
    assert target is not None
    if here not in joins(program):
        return None
    end, sides = past_jumps(frame, joins(program)[here]), []
    below = any(value is frame.stack[-1] for value in frame.stack[-2:-1])
    for way, skip_if in ((here + 1, jumps_if), (target, not jumps_if)):
        entry, given = last_copy(program, way), below or (opname in VALUED and way == target)
        if past_jumps(frame, entry) == end:
            if below or opname in VALUED:  # its value counts
                sides.append(Conditional(here, end, frozenset(), end, skip_if, given, below))
            continue
        inside = side(program, entry, end, here)
        if inside is None or any(program.instructions[i].opname.startswith(("YIELD_", "SEND")) for i in inside):
            return None
        if here in inside and not (end == RETURNED and is_in_for_alone(program, here)):
            return None
        sides.append(Conditional(here, entry, inside, end, skip_if, given, below))
    if len(sides) < 2:
        return sides[0] if sides else None
    first, second = sorted(sides, key=goes_on)
    if goes_on(first):
        return None
    if end == RETURNED:
        one, other = constants(program, first.inside), constants(program, second.inside)
        if one.isdisjoint(other) and not all(c is UNSET or c[0] in (int, float) for c in one | other):
            return None  # (what is yes or no, or nothing, is for branches)
    first.other = second
    return first


def goes_on(rows: Conditional) -> bool:
    """Whether a side that returns has the rest of a loop in it, with the branch again in each iteration."""
    return rows.here in rows.inside


def is_in_for_alone(program: Program, here: int) -> bool:
    """Whether what runs the instruction again are ``for`` loops, which are unrolled: each has its end."""
    steps = program.instructions
    back = [s.target for i, s in enumerate(steps) if s.target is not None and s.target - 1 <= here <= i]
    return {steps[target].opname for target in back} == {"FOR_ITER"}


def constants(program: Program, inside: frozenset[int]) -> set[Any]:
    """What the instructions return: constants, and UNSET for all else."""
    found = set()
    for index in inside:
        last = program.instructions[index]
        loaded = program.instructions[index - 1] if last.opname == "RETURN_VALUE" else last
        if last.opname in RETURNS:
            known = loaded is last or (loaded.opname == "LOAD_CONST" and index - 1 in inside)
            found.add((type(loaded.argval), loaded.argval) if known else UNSET)
    return found


def is_of_call(condition: Any) -> bool:
    """Whether it is a number of the call that has gone both ways."""
    return type(condition) is Number and condition.goes_both_ways


def refuse_tensors(condition: Any, body: GraphScope, gives: bool) -> None:
    """A branch on a number of the call is the graph's where it decides between numbers, or prints. What is done to
    tensors there (gives: it gives some out) is captured for each way, without the branch."""
    if not is_of_call(condition):
        return
    for node in body.graph.nodes:
        computes = node.op not in ("placeholder", "output") and node.target is not torch.full
        tensors = computes and any(is_kind(value, torch.Tensor) for value in leaves(node.meta.get("val")))
        if tensors and (gives or not only_computes(node)):
            raise Break("data-dependent branch", "a branch on a number runs operators", "it is traced again")


def is_of_row(condition: Any, row: fx.Node) -> bool:
    """Whether a condition asks for nothing but the number of this iteration's expert."""
    if is_kind(condition, TensorProxy):
        return of_row(condition.node, row)
    symbols = set(torch_private.free_unbacked_symbols(condition)) if is_kind(condition, SYMBOLIC) else set()
    read = [node for node in row.graph.nodes if node.target == "item" and of_row(node, row)]
    return bool(symbols) and symbols <= {torch_private.expression(node.meta["val"]) for node in read}


def of_row(node: fx.Node, row: fx.Node) -> bool:
    """Whether a node is computed of the row alone."""
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node is row
