"""Code that begins in the middle of a frame: how a frame goes on after a graph break.

Two code objects are made from the user's, with the ``bytecode`` package. *Native* code takes the state before the
broken instruction, puts the values back on the stack, jumps to it and runs it as Python; at the first instruction after
it, it calls the *resume function*, which takes the state from there and is captured like any other function. Both
keep the user's instructions, exception table and line numbers, so that a with-block or try-block around the break still
guards what follows. Cells are handed over as the closure, so that inner functions made earlier share them.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bytecode import Bytecode, CellVar, FreeVar, Instr, Label, TryBegin, TryEnd

from moebius.interpreter import UNSET, Frame, decode, is_kind

from ..bytecode.code_tables import with_tables
from ..bytecode.counting import marks_of, with_marks
from ..bytecode.hidden_frames import hidden
from ..bytecode.instruction_templates import JUMP_IF_FALSE, LOAD_CELL, call_constant, call_sequence, set_constant
from ..bytecode.liveness import LEAVES, accesses, falls_through, read_later, reads_unnamed
from ..bytecode.pep709_cells import hidden_later
from ..bytecode.stack_layout import (
    AFTER_LOOP,
    BEFORE_CALL,
    NULL_FIRST,
    empty_places,
    handled_exceptions,
    handled_places,
    is_dropped,
    names_stored,
    reads_one_attribute,
    without_call_prefix,
)
from ..bytecode.unbound_cells import asked_first, unset_reads
from ..regions.branches import BRANCHES, asks_for_jump
from ..values.values import UndefinedAfterLoop
from .stretches import native_end

ENTRY_OPCODES = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"})
# After these (and what they pop) the stack may hold a NULL: the native part goes on to where the expression is done.
UNCERTAIN = {"LOAD_METHOD": 1, "LOAD_ATTR": 1, "LOAD_GLOBAL": 0, "PUSH_NULL": 0, "LOAD_SUPER_ATTR": 3}
# 3.13 looks for the handler of what a Python function raises at the code unit before the call of it (Python/ceval.c
# resume_with_error): no region may begin with an instruction that makes a frame.
BEGINS_REGION = () if NULL_FIRST else ("NOP",)
HIDDEN = "a comprehension whose variable an inner function uses hides a variable of that name"
CO_OPTIMIZED, CLOSURE = 0x1, 8  # a function's code, not a class body's; SET_FUNCTION_ATTRIBUTE's flag


class CannotResume(Exception):
    """The break is at a place that no continuation can be made for."""


@dataclass(frozen=True)
class State:
    """What lives at an instruction: local names that are bound and read later, and the stack's depth with its NULLs.

    handled: places on the stack, from the bottom, at which a handler keeps the exception that was handled before
    its own; the argument for such a place is the handler's exception.
    """

    index: int
    locals: tuple[str, ...]
    cells: tuple[str, ...]
    depth: int
    nulls: frozenset[int]
    handled: tuple[int, ...] = ()


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
        if "FAST" in instruction.opname or instruction.opname in (
            "LOAD_CLOSURE",
            "LOAD_DEREF",
            "STORE_DEREF",
            "DELETE_DEREF",
        ):
            names |= set(instruction.argval if is_kind(instruction.argval, tuple) else (instruction.argval,))
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "super":
            names |= first_argument(frame_code)
        if instruction.target is not None:
            work.append(instruction.target)
        handler = program.handler_at(i)
        if handler is not None:
            work.append(handler[0])
        if falls_through(instruction):
            work.append(i + 1)
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

    def __init__(self, frame: Frame, handled: BaseException | None = None):
        """handled: the exception that the frame's innermost handler handles, if it is in one."""
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
        self.exits = self.find_exits()
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
                kept = 0 if instruction.target is not None or instruction.opname == "POP_TOP" else 1
                return [
                    self.state_at(t, d, frozenset(n for n in nulls if n < d - kept), frozenset(stored))
                    for t, d in after
                ]
            if len(after) > 1:
                raise CannotResume("an expression that branches is half-built at the break")
            ((i, depth),) = after

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
        """Code that takes ``state`` as arguments, runs the broken instruction, and hands over at the exits."""
        lines = {place: line_in(self.code, exc) for place, exc in self.exceptions.items()}
        exits = [(e, r) for e, r in zip(self.exits, resumes, strict=True)]
        return rebuild(self.code, self.state, exits, lines=lines, straight=self.comes_back_otherwise())

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

    def resume_code(self, state: State) -> types.CodeType:
        """Code that takes ``state`` as arguments and goes on from there."""
        return rebuild(self.code, state, [])


# Locals of a continuation that are not the user's: what stands in for its first instructions, and the stack's values.
STAND_IN, STACK = "m_inner", "m_stack"
STRAIGHT = f"{STACK}_straight"  # whether no handler has run


def is_own(name: str) -> bool:
    """Whether a local is a continuation's and not the user's."""
    return name == STAND_IN or name.startswith(STACK)


def on_stack(i: int) -> str:
    """The local that has the stack's value i, counted from the bottom."""
    return f"{STACK}{i}"


def argument_names(state: State) -> list[str]:
    """Names of the arguments that a continuation takes: locals, then the stack from the bottom (NULLs left out)."""
    return [*state.locals, *(on_stack(i) for i in range(state.depth) if i not in state.nulls)]


def rebuild(
    code: types.CodeType,
    state: State,
    exits: list[tuple[State, Any]],
    instead: tuple[str, int] | None = None,
    lines: dict[int, int] | None = None,
    straight: bool = False,
) -> types.CodeType:
    """The user's code with another beginning (restore ``state``, jump to it); at each exit, a call that hands over.
    instead: what is done where the code begins, the first time, in place of the instructions up to an index:
    ("raise", _) raises the argument STAND_IN; ("call", index) calls it and goes on at the index with its result.
    lines: where handled exceptions, by their place on the stack, were raised, for those that have no traceback.
    straight: no exit hands over once an exception was handled here; the user's code goes on to its end instead.
    """
    source = Bytecode.from_code(code, conserve_exception_block_stackdepth=True)
    source[:] = [counting(item) for item in source]
    cells = set(code.co_cellvars)
    instructions = [x for x in source if is_kind(x, Instr)]
    assert len(instructions) == len(decode(code).instructions), "bytecode and dis disagree on the instructions"
    taken = closure_loads(instructions) if code.co_flags & CO_OPTIMIZED else None
    may_be_unset = unset_reads(code)
    if hidden_later(code, state.index) is not None:
        raise CannotResume(HIDDEN)
    entry = Label()
    exit_of = {e.index: (e, target) for e, target in exits}
    first_line = instructions[0].location
    freevars = [*state.cells]
    body: list[Any] = []
    after = Label()
    handlers = {item.target for item in source if is_kind(item, TryBegin)} if straight else set()
    regions: dict[int, TryBegin] = {}  # by id of the user's TryBegin: the one that is open for it now
    open_region: TryBegin | None = None
    index, began = -1, False
    users: set[int] = set()  # by id: the instructions that are the user's
    marks = marks_of(code)  # where it is a continuation itself
    for item in source:
        if is_kind(item, TryBegin):
            open_region = item
            regions[id(item)] = item
        elif is_kind(item, TryEnd):
            body.append(TryEnd(regions[id(item.entry)]))
            open_region = None
            continue
        if not is_kind(item, Instr):
            body.append(item)
            if item in handlers:
                body += set_constant(STRAIGHT, False, first_line)
            continue
        index += 1
        began = began or item.name == "RESUME"
        if instead is not None and instead == ("call", index):
            body.append(after)
        if index == state.index or index in exit_of:
            # Jumps arrive here from outside the region, and what is handed over must not be guarded twice: split it.
            if open_region is not None:
                body.append(TryEnd(regions[id(open_region)]))
            if index in exit_of:
                exit_state, target = exit_of[index]
                on = Label()
                if straight:
                    body.append(Instr("LOAD_FAST", STRAIGHT, location=item.location))
                    body.append(Instr(JUMP_IF_FALSE, on, location=item.location))
                hand_over(body, exit_state, target, item)
                body.append(on)
            if index == state.index and instead is None:
                body.append(entry)
            skip = Label()
            if index == state.index and instead is not None:
                body += [Instr("JUMP_FORWARD", skip, location=item.location), entry]
            if open_region is not None:
                body.append(again := TryBegin(open_region.target, open_region.push_lasti, open_region.stack_depth))
                body += [Instr(name, location=item.location) for name in BEGINS_REGION]
                regions[id(open_region)] = again
            if index == state.index and instead is not None:
                body += stand_in(instead[0], after, item.location)
                if open_region is not None:  # the skipping jump comes from outside of the region too
                    body += [TryEnd(regions[id(open_region)]), skip]
                    body.append(again := TryBegin(open_region.target, open_region.push_lasti, open_region.stack_depth))
                    body += [Instr(name, location=item.location) for name in BEGINS_REGION]
                    regions[id(open_region)] = again
                else:
                    body.append(skip)
        if index in may_be_unset:
            body += asked_first(may_be_unset[index], item.location)
        if item.name not in ENTRY_OPCODES or (item.name == "MAKE_CELL" and began):  # (a comprehension's own)
            own = one_by_one(shared_cells(item, cells, 2 if taken is None else taken.get(index, 0)))
            if marks[index : index + 1] != "1":
                users.add(id(own[0]))
            body += own
    prologue: list[Any] = []
    if freevars:
        prologue.append(Instr("COPY_FREE_VARS", len(freevars), location=first_line))
    if code.co_flags & 0x20:
        prologue += [Instr("RETURN_GENERATOR", location=first_line), Instr("POP_TOP", location=first_line)]
    prologue.append(Instr("RESUME", 0, location=first_line))
    if straight:
        prologue += set_constant(STRAIGHT, True, first_line)
    for i in range(state.depth):
        if i in state.nulls:
            prologue.append(Instr("PUSH_NULL", location=first_line))
        elif i in state.handled:
            prologue += handle_again(on_stack(i), first_line, (lines or {}).get(i))
        else:
            prologue.append(Instr("LOAD_FAST", on_stack(i), location=first_line))
    prologue.append(Instr("JUMP_FORWARD", entry, location=first_line))
    out = Bytecode([*prologue, *body])
    arguments = argument_names(state) + ([STAND_IN] if instead else [])
    out.argcount, out.posonlyargcount, out.kwonlyargcount = len(arguments), 0, 0
    out.argnames = arguments
    out.freevars, out.cellvars = freevars, []
    out.filename, out.first_lineno, out.docstring = code.co_filename, code.co_firstlineno, None
    out.name = code.co_name
    if hasattr(source, "qualname"):
        out.qualname = source.qualname
    out.flags = source.flags & ~0x0C
    # Handlers' stack depths are the user's (what stands on the stack where a region is split is no part of them); the
    # stack has room for the user's code, and for the calls that hand over or ask for the handled exception.
    most = max((len(e.cells) + len(argument_names(e)) for e, _ in exits), default=0)
    room = max(code.co_stacksize, most, state.depth) + 5
    ours = [id(item) not in users for item in without_dead_code(out) if is_kind(item, Instr)]
    return with_marks(with_tables(out.to_code(stacksize=room, compute_exception_stack_depths=False)), ours)


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


def generator_code(code: types.CodeType, state: State) -> types.CodeType:
    """A generator's code that begins in ``state``. At a yield it yields once more (None) to be suspended there."""
    return rebuild(code, state, [])


def without_dead_code(source: Bytecode) -> Bytecode:
    """The same without unreachable instructions: assembling needs the stack's depth, which only live code has."""
    items = list(source)
    place = {id(x): i for i, x in enumerate(items) if is_kind(x, Label)}
    guarded: list[TryBegin | None] = []
    region: TryBegin | None = None
    for item in items:
        if is_kind(item, TryBegin):
            region = item
        elif is_kind(item, TryEnd):
            region = None
        guarded.append(region)
    live: set[int] = set()
    work = [0]
    while work:
        i = work.pop()
        if i >= len(items) or i in live:
            continue
        live.add(i)
        item, handler = items[i], guarded[i]
        if is_kind(item, Instr):
            if handler is not None:
                work.append(place[id(handler.target)])
            if is_kind(item.arg, Label):
                work.append(place[id(item.arg)])
            if item.is_final():
                continue
        work.append(i + 1)
    kept = {id(guarded[i]) for i in live if is_kind(items[i], Instr)}
    source[:] = [
        item
        for i, item in enumerate(items)
        if is_kind(item, Label)
        or (is_kind(item, TryBegin) and id(item) in kept)
        or (is_kind(item, TryEnd) and id(item.entry) in kept)
        or (not is_kind(item, TryBegin | TryEnd) and i in live)
    ]
    return source


def hand_over(body: list[Any], state: State, target: Any, near: Instr) -> None:
    """At an exit: put the stack into locals, leave the handlers, then ``return target(cells, *state)``."""
    at = near.location
    for i in reversed(range(state.depth)):
        # a NULL too: storing it leaves the local unbound, whereas POP_TOP would drop a reference of nothing
        if i in state.handled:
            body += [*call_constant(sys.exception, at), Instr("SWAP", 2, location=at), Instr("POP_EXCEPT", location=at)]
        body.append(Instr("STORE_FAST", on_stack(i), location=at))
    arguments = [Instr(LOAD_CELL, FreeVar(name), location=at) for name in state.cells]
    arguments += [Instr("LOAD_FAST", name, location=at) for name in argument_names(state)]
    body += call_sequence(Instr("LOAD_CONST", target, location=at), arguments, at)
    body.append(Instr("RETURN_VALUE", location=at))


def stand_in(what: str, after: Label, at: Any) -> list[Any]:
    """What ``rebuild`` puts in the place of the instructions that a code begins with."""
    inner = Instr("LOAD_FAST", STAND_IN, location=at)
    if what == "raise":  # (the local goes first: an exception's traceback leads to the frame)
        return [inner, Instr("DELETE_FAST", STAND_IN, location=at), Instr("RAISE_VARARGS", 1, location=at)]
    return [*call_sequence(inner, [], at), Instr("JUMP_FORWARD", after, location=at)]


def handle_again(name: str, at: Any, line: int | None) -> list[Any]:
    """Instructions that begin to handle the exception in a local as a handler does.

    Nothing is raised: that would change the exception's traceback and context. PUSH_EXC_INFO may stand anywhere
    (Python/bytecodes.c): it makes the value on the stack the handled exception.
    """
    load = Instr("LOAD_FAST", name, location=at)
    drop = Instr("POP_TOP", location=at)
    placed: list[Any] = []
    if line is not None:
        arguments = [load, Instr("LOAD_CONST", line, location=at)]
        helper: Any = give_place
        placed = [*call_sequence(Instr("LOAD_CONST", helper, location=at), arguments, at), drop]
    return [*placed, load, Instr("PUSH_EXC_INFO", location=at), drop]


def give_place(exc: BaseException, line: int) -> None:
    """An exception that was raised in a graph, and made again, gets the traceback's entry for the calling frame."""
    if exc.__traceback__ is None:
        frame = sys._getframe(1)
        here = (2 * i for i, place in enumerate(frame.f_code.co_positions()) if place[0] == line and i)
        exc.__traceback__ = types.TracebackType(None, frame, next(here, -1), line)


def line_in(code: types.CodeType, exc: BaseException | None) -> int:
    """The line of a function's code at which an exception was raised in it, while tracing; its `def` where unknown."""
    place = exc.__traceback__ if exc is not None else None
    while place is not None:
        found = place.tb_frame.f_code
        if (found.co_filename, found.co_firstlineno, found.co_name) == (
            code.co_filename,
            code.co_firstlineno,
            code.co_name,
        ):
            return place.tb_lineno
        place = place.tb_next
    return code.co_firstlineno


def closure_loads(instructions: list[Instr]) -> dict[int, int]:
    """From 3.13 on, which instructions load cells for an inner function's closure, and how many of their names, from
    the last one: the others of the same name load what a comprehension in the frame has put in the cell's place."""
    found: dict[int, int] = {}
    for index, item in enumerate(instructions):
        if item.name != "SET_FUNCTION_ATTRIBUTE" or item.arg != CLOSURE:
            continue
        tuple_, at = instructions[index - 3], index - 4  # then the code, and MAKE_FUNCTION
        left = tuple_.arg if tuple_.name == "BUILD_TUPLE" and is_kind(tuple_.arg, int) else 0
        while left > 0:
            arg = instructions[at].arg
            found[at] = min(left, len(arg) if is_kind(arg, tuple) else 1)
            left, at = left - found[at], at - 1
    return found


def shared_cells(item: Instr, cells: set[str], taken: int) -> Instr:
    """The instruction with the frame's own cells turned into free variables.

    An argument's cell is in the argument's own place: from 3.13 on a closure takes it with LOAD_FAST, by its name.
    taken: how many names at the end of the instruction are loaded for a closure.
    """
    if is_kind(item.arg, tuple) and "FAST" in item.name:
        first = len(item.arg) - taken
        parts = tuple(shared(part, cells if place >= first else set()) for place, part in enumerate(item.arg))
        return Instr(item.name, parts, location=item.location) if parts != item.arg else item
    # (3.14 counts LOAD_DEREF among the local instructions, and the package gives an argument's cell by its name)
    by_nature = item.name == "LOAD_CLOSURE" or item.name.endswith("_DEREF")
    if is_kind(item.arg, CellVar) or by_nature or (taken and item.name == LOAD_CELL):
        return Instr(item.name, shared(item.arg, cells), location=item.location)
    return item


def counting(item: Any) -> Any:
    """An instruction that borrows a local (3.14) as one that counts its reference: the compiler borrows where nothing
    keeps the value or sets the local meanwhile, which an exit may do."""
    if not is_kind(item, Instr) or "_BORROW" not in item.name:
        return item
    return Instr(item.name.replace("_BORROW", ""), item.arg, location=item.location)


def one_by_one(item: Instr) -> list[Instr]:
    """Two accesses to locals that are one instruction (3.13) as two: one holds places up to 15 only, and the same names
    have other places here. (The assembler would give the first place, and the second to the same instruction.)"""
    if not is_kind(item.arg, tuple) or "FAST" not in item.name:
        return [item]
    kinds = [part.strip("_") for part in item.name.split("FAST")[:-1]]
    return [Instr(f"{kind}_FAST", part, location=item.location) for kind, part in zip(kinds, item.arg, strict=True)]


def shared(named: Any, cells: set[str]) -> Any:
    """What an instruction names, a cell of the frame's as a free variable."""
    name = named.name if is_kind(named, CellVar) else named
    return FreeVar(name) if is_kind(name, str) and (name is not named or name in cells) else named


def with_cells(code: types.CodeType, globals_: dict[str, Any], name: str, n_cells: int) -> Callable[..., Any]:
    """A callable (cells..., state...) that runs continuation code natively."""
    if not n_cells:
        return types.FunctionType(code, globals_, name)

    @hidden
    def run(*args: Any) -> Any:
        return types.FunctionType(code, globals_, name, None, args[:n_cells])(*args[n_cells:])

    return run
