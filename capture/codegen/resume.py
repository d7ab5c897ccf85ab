"""How a frame goes on after a graph break.

Two code objects are made from the user's (``continuation_code``). *Native* code takes the state before the broken
instruction and runs it as Python; at the first instruction after it, it calls the *resume function*, which takes the
state from there and is captured like any other function.
"""

from __future__ import annotations

import dis
import types
from typing import Any

import torch

from moebius.interpreter import UNSET, Frame, decode, is_kind

from ..bytecode.liveness import LEAVES, accesses, falls_through, names_a_cell, read_later, reads_unnamed, ways_on
from ..bytecode.stack_layout import (
    AFTER_LOOP,
    BEFORE_CALL,
    empty_places,
    handled_exceptions,
    handled_places,
    is_dropped,
    leaves_result,
    names_stored,
    nulls_left,
    reads_one_attribute,
    without_call_prefix,
)
from ..regions.branches import BRANCHES, asks_for_jump
from ..values.values import UndefinedAfterLoop
from .continuation_code import HIDDEN, CannotResume, State, build_continuation, is_own
from .stretches import native_end

# After these (and what they pop) the stack may hold a NULL: the native part goes on to where the expression is done.
SUSPENDS = ("YIELD_VALUE", "SEND", "LOAD_FAST_AND_CLEAR")  # the last hides a local in a comprehension
UNCERTAIN = {"LOAD_METHOD": 1, "LOAD_ATTR": 1, "LOAD_GLOBAL": 0, "PUSH_NULL": 0, "LOAD_SUPER_ATTR": 3}


def is_held(name: str, value: Any) -> bool:
    """Whether a local lives until its frame ends, though nothing reads it. A module's hooks in an autograd graph know
    it by a weak reference, and a leaf its autograd node, which may have hooks."""
    return not is_own(name) and issubclass(type(value), torch.nn.Module | torch.autograd.graph.Node)


def live_names(frame_code: types.CodeType, index: int) -> set[str]:
    """Local names that some instruction reachable from ``index`` loads. More than needed does no harm."""
    program = decode(frame_code)
    seen, work, names = set(), [index], set[str]()
    if reads_unnamed(frame_code):
        names |= {name for name in program.localsplus if not is_own(name)}
    while work:
        i = work.pop()
        if i in seen or i >= len(program.instructions):
            continue
        seen.add(i)
        instruction = program.instructions[i]
        if "FAST" in instruction.opname or names_a_cell(instruction):
            names |= set(instruction.argval if is_kind(instruction.argval, tuple) else (instruction.argval,))
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "super":
            names |= first_argument(frame_code)
        work += ways_on(program, i, handlers=True)
    return names


def first_argument(code: types.CodeType) -> set[str]:
    """What ``super()`` without arguments reads behind the bytecode's back (``super_init_without_args`` in
    Objects/typeobject.c): the frame's first local, which has to stay the first."""
    if "__class__" not in code.co_freevars:
        return set()
    if not code.co_argcount:
        raise CannotResume("super() in a method without a first argument")
    if code.co_varnames[0] in code.co_cellvars:
        raise CannotResume("super() without arguments, of an object that an inner function uses as well")
    return {code.co_varnames[0]}


class Continuation:
    """How a stopped frame goes on: ``state`` before the broken instruction, native code for it, and its exits."""

    def __init__(self, frame: Frame, handled: BaseException | None = None, in_each_iteration: bool = False):
        """handled: the exception that the innermost handler handles, if the frame is in one. in_each_iteration: that a
        loop around the break would break in each of its iterations: it runs natively to its end."""
        self.frame, self.code = frame, frame.code
        self.program = frame.program
        self.handled = handled_places(frame.code)
        self.broken = frame.pc
        self.entry = without_call_prefix(self.program, frame.pc)
        held = zip(self.program.localsplus, frame.locals, strict=True)
        leftovers = {name for name, value in held if type(value) is UndefinedAfterLoop}
        self.gone = leftovers - read_later(self.code, self.entry) if leftovers else leftovers
        refuse_cells(frame.stack)
        self.calls_super = first_argument(self.code) if any(value is super for value in frame.stack) else set()
        if self.calls_super and frame.locals[0] is UNSET:
            raise CannotResume("super() without arguments, behind the end of its object's variable")
        self.state = self.state_at(self.entry, len(frame.stack), empty_places(frame.stack))
        self.exits = self.behind_outermost_loop() if in_each_iteration else []
        self.whole_loop = bool(self.exits)
        self.exits = self.exits or self.find_exits()
        self.exceptions = handled_exceptions(frame.stack, self.state.handled, handled)

    # ------------------------------------------------------------------------------------------------------------------
    # States
    # ------------------------------------------------------------------------------------------------------------------

    def state_at(self, index: int, depth: int, nulls: frozenset[int], stored: frozenset[str] = frozenset()) -> State:
        live = live_names(self.code, index) | self.calls_super
        cell_names = tuple(name for i, name in enumerate(self.program.localsplus) if i in self.program.cell_indices)
        bound = tuple(
            name
            for i, name in enumerate(self.program.localsplus)
            if i not in self.program.cell_indices
            and (name in live or is_held(name, self.frame.locals[i]))
            and ((self.frame.locals[i] is not UNSET and name not in self.gone) or name in stored)
        )
        return State(index, bound, cell_names, depth, nulls, self.handled[index])

    def find_exits(self) -> list[State]:
        """The states right after the native part: one for each way on."""
        instructions = self.program.instructions
        depth, nulls = len(self.frame.stack), self.state.nulls
        stored: set[str] = set()
        i, (last, untouched) = self.broken, native_end(self.frame)
        if instructions[i].opname == "LOAD_SPECIAL":  # Python leaves the method bound, or with its object
            raise CannotResume("a with-block, where its methods are looked up")
        pops = UNCERTAIN.get(instructions[i].opname)
        limit = None if pops is None or last > i else depth - pops + 1
        while True:
            instruction = instructions[i]
            stored |= names_stored(instruction)
            if instruction.opname in LEAVES:
                return []
            ways = [(i + 1, False)] if falls_through(instruction) else []
            if instruction.target is not None:
                ways.append((instruction.target, True))
            after = [self.behind_loop(target, depth + self.effect(i, jump)) for target, jump in ways]
            if last > self.broken:  # a straight line
                if i >= last and instructions[i + 1].opname not in BRANCHES:
                    left = frozenset(n for n in nulls if n < untouched)
                    return [self.state_at(t, d, left, frozenset(stored)) for t, d in after]
                ((i, depth),) = after
                continue
            done = limit is None and instruction.opname not in BEFORE_CALL
            follows = any(test(instructions, i) for test in (is_dropped, reads_one_attribute, asks_for_jump))
            if done and follows:  # the next instruction belongs to it
                i, depth, limit = i + 1, after[0][1], after[0][1]
                continue
            if done or (limit is not None and all(d <= limit for _, d in after)):
                # every instruction that can break leaves at most one result, above what it did not touch
                kept = leaves_result(instruction)
                below = [frozenset(n for n in nulls if n < d - kept) | nulls_left(instruction, d) for _, d in after]
                return [
                    self.state_at(t, d, left, frozenset(stored)) for (t, d), left in zip(after, below, strict=True)
                ]
            if len(after) > 1:
                raise CannotResume("an expression that branches is half-built at the break")
            ((i, depth),) = after

    def behind_outermost_loop(self) -> list[State]:
        """The states where the outermost ``for`` around the broken instruction is left; none where there is no such
        loop, or where what it leaves is not the same in each call: a name that it may set, a handler, a yield."""
        instructions = self.program.instructions
        loops = (range(i, x.target or 0) for i, x in enumerate(instructions[: self.broken]) if x.opname == "FOR_ITER")
        inside, handler = next((x for x in loops if self.broken in x), None), self.program.handler_at(self.broken)
        if inside is None:
            return []
        work, seen, exits = [(self.broken, len(self.frame.stack))], set[int](), dict[int, int]()
        while work:
            i, depth = work.pop()
            if i not in inside:
                exits.setdefault(i, depth)
            elif i not in seen:
                seen.add(i)
                instruction = instructions[i]
                changes = {kind for kind, _ in accesses(instruction)} & {"DELETE", "CLEAR"}
                if self.program.handler_at(i) != handler or changes or instruction.opname in SUSPENDS:
                    return []
                if instruction.opname not in LEAVES:
                    ways = [(i + 1, False)] if falls_through(instruction) else []
                    ways += [] if instruction.target is None else [(instruction.target, True)]
                    work += [self.behind_loop(target, depth + self.effect(i, jump)) for target, jump in ways]
        values = zip(self.program.localsplus, self.frame.locals, strict=True)
        bound = {name for name, value in values if value is not UNSET} - self.gone
        unset = {name for i in seen for name in names_stored(instructions[i])} - bound
        if any(unset & live_names(self.code, i) for i in exits):
            return []
        return [self.state_at(i, d, frozenset(n for n in self.state.nulls if n < d)) for i, d in exits.items()]

    def behind_loop(self, index: int, depth: int) -> tuple[int, int]:
        """Where the instruction before really goes on: FOR_ITER skips what stands at its target from 3.12 on, END_FOR
        and 3.13's POP_TOP, and has popped the iterator itself up to 3.13 (Python/bytecodes.c)."""
        if self.program.instructions[index].opname == "END_FOR":
            for _ in range(AFTER_LOOP):
                index, depth = index + 1, depth + self.effect(index, False)
        return index, depth

    def effect(self, index: int, jump: bool) -> int:
        """What the instruction does to the stack's depth. (3.11 books a call's arguments on the PRECALL before it.)"""
        instruction = self.program.instructions[index]
        before = self.program.instructions[index - 1]
        total = dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
        if instruction.opname == "CALL" and before.opname == "PRECALL" and index == self.broken:
            total += dis.stack_effect(before.opcode, before.arg)
        return total

    # ------------------------------------------------------------------------------------------------------------------
    # Code
    # ------------------------------------------------------------------------------------------------------------------

    def native_code(self, resumes: list[Any]) -> types.CodeType:
        """Code that takes ``state`` out of a list, runs the broken instruction, and hands over at the exits."""
        exits = [(e, r) for e, r in zip(self.exits, resumes, strict=True)]
        straight = self.comes_back_otherwise()
        return build_continuation(self.code, self.state, exits, straight=straight, from_list=True)

    def comes_back_otherwise(self) -> bool:
        """Whether the frame may come to an exit once more, through a handler and a loop, as another than the exit is
        made for: with a local that was unset before, or none where one was set; or in the middle of a call, whose
        method may stand on the stack in another way then (with the object, or a NULL and bound)."""
        handler = self.program.handler_at(self.broken)
        if handler is None:
            return False
        deleted = {name for i in self.program.instructions for kind, name in accesses(i) if kind == "DELETE"}
        for state in self.exits:
            known = {*state.locals, *state.cells}
            if state.depth - 1 > handler[1] or deleted & known or read_later(self.code, state.index) - known:
                return True
        return False


def suspended_state(frame: Frame) -> State:
    """The state of a generator's frame at the yield that it is suspended at, or at its start."""
    program = frame.program
    if frame.suspended:
        live = live_names(frame.code, frame.pc)
        index, depth = frame.pc, len(frame.stack) + 1  # the value to yield is on the stack again
    else:
        index = next(i for i, x in enumerate(program.instructions) if x.opname == "RETURN_GENERATOR") + 2  # its POP_TOP
        live, depth = set(program.localsplus), len(frame.stack)
    refuse_cells(frame.stack)
    cells = tuple(n for i, n in enumerate(program.localsplus) if i in program.cell_indices)
    bound = tuple(
        n
        for i, n in enumerate(program.localsplus)
        if i not in program.cell_indices and n in live and frame.locals[i] is not UNSET
    )
    return State(index, bound, cells, depth, empty_places(frame.stack))


def refuse_cells(stack: list[Any]) -> None:
    """Below a comprehension in the frame (PEP 709) stands the cell that its variable hides, to be put back as it is."""
    if any(type(value) is types.CellType for value in stack):
        raise CannotResume(HIDDEN)
