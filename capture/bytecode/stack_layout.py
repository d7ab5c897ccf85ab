"""What a code object says of a place in it: which exceptions are handled there, and what a call takes and leaves."""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

from moebius.interpreter import ITERATOR_PLACES, NULL, UNSET, decode

from .liveness import accesses, falls_through, ways_on

BEFORE_CALL = frozenset({"KW_NAMES", "PRECALL"})
CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
TAKE_ALONE = (  # how the names of instructions begin that take values and leave none
    "STORE_", "DELETE_", "POP_", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE", "MAP_ADD", "DICT_UPDATE",
    "DICT_MERGE", "IMPORT_STAR", "PRINT_EXPR", "END_FOR",
)  # fmt: skip
# What a with-block keeps of __exit__ on the stack: from 3.14 on with a NULL above it.
EXIT_PARTS = 2 if "LOAD_SPECIAL" in dis.opmap else 1
NULL_FIRST = sys.version_info < (3, 13)  # 3.13 puts a call's NULL above the callable
# Instructions where FOR_ITER jumps to that it has done itself: END_FOR, and on 3.13 the POP_TOP behind it.
AFTER_LOOP = 2 if not NULL_FIRST and "POP_ITER" not in dis.opmap else 1


def handled_places(code: types.CodeType) -> list[tuple[int, ...]]:
    """For each instruction, where on the stack the handlers that it is in keep the exception handled before theirs.

    PUSH_EXC_INFO puts it in the place of the exception, POP_EXCEPT takes it off (Python/compile.c).
    """
    program = decode(code)
    instructions = program.instructions
    found: list[tuple[int, ...] | None] = [None] * len(instructions)
    begun = begun_in_prologue(instructions)
    work: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while work:
        index, places = work.pop()
        if index >= len(instructions) or found[index] is not None:
            continue
        found[index] = places
        instruction = instructions[index]
        handler = program.handler_at(index)
        if handler is not None:
            target, depth, lasti = handler
            outer = tuple(p for p in places if p < depth)
            pushed = instructions[target].opname == "PUSH_EXC_INFO"
            if pushed and found[target] is None:
                found[target] = outer
                work.append((target + 1, (*outer, depth + lasti)))
            elif not pushed:
                work.append((target, outer))
        if index in begun:
            places = (*places, begun[index])
        if instruction.opname == "POP_EXCEPT":
            places = places[:-1]
        work += [(way, places) for way in ways_on(program, index)]
    return [places or () for places in found]


def begun_in_prologue(instructions: Any) -> dict[int, int]:
    """The handlers that a resume function begins with (`handle_again`): instruction and place on the stack."""
    found, depth = {}, 0
    for index, instruction in enumerate(instructions):
        if instruction.target is not None or not falls_through(instruction):
            break
        if instruction.opname == "PUSH_EXC_INFO":
            found[index] = depth - 1
        depth = max(0, depth + dis.stack_effect(instruction.opcode, instruction.arg, jump=False))
    return found


def handled_exceptions(stack: list[Any], places: tuple[int, ...], innermost: BaseException | None) -> dict[int, Any]:
    """The exception that each handler handles, by its place on the stack (see ``State.handled``)."""
    found = {}
    for place in reversed(places):
        found[place] = innermost
        innermost = stack[place]
    return found


def run_again(frame: Any, pc: int, end: int) -> tuple[types.CodeType, list[int]]:
    """The code, and the offsets of the instructions before ``end`` that a continuation at ``pc`` begins with."""
    begins = without_call_prefix(frame.program, pc)
    return frame.code, [instruction.offset for instruction in frame.program.instructions[begins:end]]


def without_call_prefix(program: Any, index: int) -> int:
    """Where the instructions of a call begin: those that only prepare the CALL belong to it."""
    while program.instructions[index - 1].opname in BEFORE_CALL:
        index -= 1
    return index


def operands_popped(instruction: Any) -> int:
    """How many values an instruction takes that leaves one result."""
    if instruction.opname == "CALL":
        return instruction.arg + 2
    if instruction.opname == "CALL_KW":
        return instruction.arg + 3
    return 1 - dis.stack_effect(instruction.opcode, instruction.arg, jump=False)


def callee_position(instruction: Any, stack: list[Any]) -> int | None:
    """Where the callable is on the stack that stands before a call, or None."""
    depth = len(stack)
    if instruction.opname == "CALL" or instruction.opname == "PRECALL":
        low = depth - (instruction.arg or 0) - 2
        return low + 1 if NULL_FIRST and stack[low] is NULL else low
    if instruction.opname == "CALL_KW":
        return depth - (instruction.arg or 0) - 3
    if instruction.opname == "CALL_FUNCTION_EX":
        return depth - operands_popped(instruction) + NULL_FIRST
    return None


def empty_places(stack: list[Any]) -> frozenset[int]:
    """Where a stack holds NULL, as CPython sees it: around calls and, from 3.12 on, below a comprehension in the frame
    (PEP 709), for a local of its variable's name that had no value."""
    return frozenset(i for i, value in enumerate(stack) if value is NULL or value is UNSET)


def leaves_result(instruction: Any) -> bool:
    """Whether what an instruction that may break leaves on top of the stack is its own, no value from before."""
    name = instruction.opname
    takes_alone = name.startswith(TAKE_ALONE) and name != "STORE_FAST_LOAD_FAST"
    return instruction.target is None and not takes_alone


def nulls_left(instruction: Any, depth: int) -> frozenset[int]:
    """Where the instruction leaves a NULL on a stack that is ``depth`` high behind it: the place beside an iterator."""
    made = instruction.opname in ("GET_ITER", "GET_YIELD_FROM_ITER")
    return frozenset(range(depth - ITERATOR_PLACES + 1, depth)) if made else frozenset()


def is_dropped(instructions: Any, index: int) -> bool:
    """Whether nothing is done with an instruction's result, as in ``clip_grad_norm_(parameters, 1.0)``: it is dropped
    before the frame is handed over, and is no argument of its rest, which would be for results like this one alone."""
    following = instructions[index + 1].opname if index + 1 < len(instructions) else ""
    return following == "POP_TOP" and instructions[index].target is None and falls_through(instructions[index])


def reads_one_attribute(instructions: Any, index: int) -> bool:
    """Whether all that is used of a call's result is an attribute, as in ``loss = model(x).loss``: that is read before
    the frame is handed over, because what is handed over lives as long as the rest of the frame runs (the logits)."""
    if instructions[index].opname not in CALLS or index + 2 >= len(instructions):
        return False
    read, stored = instructions[index + 1 : index + 3]
    method = sys.version_info >= (3, 12) and bool((read.arg or 0) & 1)
    return read.opname == "LOAD_ATTR" and not method and stored.opname.startswith("STORE_FAST")


def names_stored(instruction: Any) -> set[str]:
    return {name for kind, name in accesses(instruction) if kind == "STORE"}
