"""Code that begins in the middle of a frame.

It is the user's code, assembled anew with the ``bytecode`` package: it takes the state of the frame at an instruction,
puts the values back on the stack and jumps there. The user's instructions, exception table and line numbers are kept,
so that a with-block or try-block around the place still guards what follows. Cells are handed over as the closure, so
that inner functions made earlier share them.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bytecode import Bytecode, CellVar, FreeVar, Instr, Label, TryBegin, TryEnd

from moebius.interpreter import ITERATOR_PLACES, decode, is_kind

from ..bytecode.code_tables import with_tables
from ..bytecode.counting import weights_of, with_weights
from ..bytecode.instruction_templates import (
    JUMP_IF_FALSE,
    LOAD_CELL,
    call_constant,
    call_on_top,
    call_sequence,
    set_constant,
)
from ..bytecode.pep709_cells import hidden_later
from ..bytecode.stack_layout import NULL_FIRST
from ..bytecode.unbound_cells import asked_first, unset_reads
from ..hook import native

# An error, and no crash, where a state is not what it was taken for. (3.11 always checks.)
LOAD_SET = "LOAD_FAST_CHECK" if "LOAD_FAST_CHECK" in dis.opmap else "LOAD_FAST"
# What stands beside an iterator is handed over as NULL: a loop of ours must not count there.
MAKES_ITERATOR = {"GET_ITER"} if ITERATOR_PLACES > 1 else set()
ENTRY_OPCODES = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"})
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


# Locals of a continuation that are not the user's: what stands in for its first instructions, the stack's values, and
# an empty list of arguments.
STAND_IN, STACK, VALUES = "m_inner", "m_stack", "m_values"
STRAIGHT = f"{STACK}_straight"  # whether no handler has run


def is_own(name: str) -> bool:
    """Whether a local is a continuation's and not the user's."""
    return name in (STAND_IN, VALUES) or name.startswith(STACK)


def on_stack(i: int) -> str:
    """The local that has the stack's value i, counted from the bottom."""
    return f"{STACK}{i}"


def slot_of(name: str) -> int | None:
    """Which of the stack's values has this name; None where it is no such name."""
    number = name.removeprefix(STACK)
    return int(number) if number != name and number.isdecimal() else None


@dataclass(frozen=True)
class Beginning:
    """Where a continuation begins in the user's code. on_data: behind what asked for a tensor's value."""

    code: types.CodeType
    state: State
    on_data: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of what the code takes: the cells first."""
        return (*self.state.cells, *argument_names(self.state))

    def resume_code(self) -> types.CodeType:
        """Code that takes the state as arguments and goes on from there."""
        return build_continuation(self.code, self.state, [])

    def native_code(self) -> types.CodeType:
        """The same for Python: it takes the state out of a list."""
        return build_continuation(self.code, self.state, [], from_list=True)


def argument_names(state: State) -> list[str]:
    """Names of the arguments that a continuation takes: locals, then the stack from the bottom (NULLs left out)."""
    return [*state.locals, *(on_stack(i) for i in range(state.depth) if i not in state.nulls)]


def build_continuation(
    code: types.CodeType,
    state: State,
    exits: list[tuple[State, Any]],
    instead: tuple[str, int] | None = None,
    straight: bool = False,
    from_list: bool = False,
) -> types.CodeType:
    """The user's code with another beginning (restore ``state``, jump to it); at each exit, a call that hands over,
    unless a trace function has been set meanwhile.
    instead: what is done where the code begins, the first time, in place of the instructions up to an index:
    ("raise", _) raises the argument STAND_IN; ("call", index) calls it and goes on at the index with its result;
    ("yield", index) yields as the user's instruction there does, which has run already, and goes on at the index.
    straight: no exit hands over once an exception was handled here; the user's code goes on to its end instead.
    from_list: the arguments are the items of one list, which is empty then: what the code lets go of, nobody holds.
    """
    source = Bytecode.from_code(code, conserve_exception_block_stackdepth=True)
    source[:] = [counting(item) for item in source]
    cells = set(code.co_cellvars)
    instructions = [x for x in source if is_kind(x, Instr)]
    assert len(instructions) == len(decode(code).instructions), "bytecode and dis disagree on the instructions"
    taken = closure_loads(instructions) if code.co_flags & CO_OPTIMIZED else None
    may_be_unset = unset_reads(code)
    refuse_hidden(code, state.index)
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
    weights = weights_of(code)
    users: dict[int, int] = {}  # by id: how often the instructions count that are the user's
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
        if instead is not None and instead[0] != "raise" and instead[1] == index:
            body.append(after)
        if index == state.index or index in exit_of:
            # Jumps arrive here from outside the region, and what is handed over must not be guarded twice: split it.
            if open_region is not None:
                body.append(TryEnd(regions[id(open_region)]))
            if index in exit_of:
                exit_state, target = exit_of[index]
                on = Label()  # a debugger that was entered meanwhile is to find the frame's next line here
                body += [*call_constant(native.is_traced, item.location), Instr("UNARY_NOT", location=item.location)]
                body.append(Instr(JUMP_IF_FALSE, on, location=item.location))
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
                body += stand_in(instead[0], after, item.location, instructions[index : index + 2])
                if open_region is not None:  # the skipping jump comes from outside of the region too
                    body += [TryEnd(regions[id(open_region)]), skip]
                    body.append(again := TryBegin(open_region.target, open_region.push_lasti, open_region.stack_depth))
                    body += [Instr(name, location=item.location) for name in BEGINS_REGION]
                    regions[id(open_region)] = again
                else:
                    body.append(skip)
        if index in may_be_unset:
            *asking, raises, on = asked_first(may_be_unset[index], item.location)
            body += [*asking, raises, on]
            users[id(raises)] = weights[index]  # (in the place of the read)
        if item.name not in ENTRY_OPCODES or (item.name == "MAKE_CELL" and began):  # (a comprehension's own)
            if exits and item.name in MAKES_ITERATOR:
                body += call_on_top(native.uncounted, item.location)
            own = one_by_one(shared_cells(item, cells, 2 if taken is None else taken.get(index, 0)))
            users[id(own[0])] = weights[index]
            body += own
    prologue: list[Any] = []
    if freevars:
        prologue.append(Instr("COPY_FREE_VARS", len(freevars), location=first_line))
    if code.co_flags & 0x20:
        prologue += [Instr("RETURN_GENERATOR", location=first_line), Instr("POP_TOP", location=first_line)]
    prologue.append(Instr("RESUME", 0, location=first_line))
    if straight:
        prologue += set_constant(STRAIGHT, True, first_line)
    arguments = argument_names(state) + ([STAND_IN] if instead is not None and instead[0] != "yield" else [])
    if from_list:
        prologue += take_out(arguments, first_line)
    for i in range(state.depth):
        if i in state.nulls:
            prologue.append(Instr("PUSH_NULL", location=first_line))
            continue
        if i in state.handled:
            prologue += handle_again(on_stack(i), first_line)
        else:
            prologue.append(Instr("LOAD_FAST", on_stack(i), location=first_line))
        if from_list:
            prologue.append(Instr("DELETE_FAST", on_stack(i), location=first_line))
    prologue.append(Instr("JUMP_FORWARD", entry, location=first_line))
    out = Bytecode([*prologue, *body])
    out.argnames = [list_name(arguments)] if from_list else arguments
    out.argcount, out.posonlyargcount, out.kwonlyargcount = len(out.argnames), 0, 0
    out.freevars, out.cellvars = freevars, []
    out.filename, out.first_lineno, out.docstring = code.co_filename, code.co_firstlineno, None
    out.name = code.co_name
    if hasattr(source, "qualname"):
        out.qualname = source.qualname
    out.flags = source.flags & ~0x0C
    # Handlers' stack depths are the user's (what stands on the stack where a region is split is no part of them); the
    # stack has room for the user's code, and for the calls that hand over or ask for the handled exception.
    most = max((len(e.cells) + len(argument_names(e)) for e, _ in exits), default=0)
    room = max(code.co_stacksize, most, state.depth, len(arguments)) + 5
    counts = [users.get(id(item), 0) for item in without_dead_code(out) if is_kind(item, Instr)]
    made = with_tables(out.to_code(stacksize=room, compute_exception_stack_depths=False))
    return with_weights(made, counts, (code, state.index, state.depth))


def refuse_hidden(code: types.CodeType, index: int) -> None:
    if hidden_later(code, index) is not None:
        raise CannotResume(HIDDEN)


def deferred_code(code: types.CodeType, state: State, instead: tuple[str, int] | None) -> Callable[[], types.CodeType]:
    """The same, assembled when it is asked for: most side exits are never taken."""
    refuse_hidden(code, state.index)
    return functools.cache(functools.partial(build_continuation, code, state, [], instead))


def generator_code(code: types.CodeType, state: State) -> types.CodeType:
    """A generator's code that begins in ``state``. At a yield it yields once more (None) to be suspended there, by an
    instruction that is not the user's: the user's has run."""
    at_yield = decode(code).instructions[state.index].opname == "YIELD_VALUE"
    return build_continuation(code, state, [], ("yield", state.index + 2) if at_yield else None)  # (behind RESUME)


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
    arguments += [Instr(LOAD_SET, name, location=at) for name in argument_names(state)]
    body += call_sequence(Instr("LOAD_CONST", target, location=at), arguments, at)
    body.append(Instr("RETURN_VALUE", location=at))


def take_out(names: list[str], at: Any) -> list[Any]:
    """Instructions that move the items of the list into locals."""
    load = Instr("LOAD_FAST", list_name(names), location=at)
    moved = [load, Instr("UNPACK_SEQUENCE", len(names), location=at)]
    empty: Any = list.clear
    moved += call_sequence(Instr("LOAD_CONST", empty, location=at), [load], at)
    moved.append(Instr("POP_TOP", location=at))
    moved += [Instr("STORE_FAST", name, location=at) for name in names]
    return moved if names else [*moved, Instr("DELETE_FAST", VALUES, location=at)]


def list_name(names: list[str]) -> str:
    """The local that has the list before: the first one's, which stays the frame's first for ``super()``."""
    return names[0] if names else VALUES


def stand_in(what: str, after: Label, at: Any, begins: list[Instr]) -> list[Any]:
    """What ``build_continuation`` puts in the place of the instructions that a code begins with."""
    if what == "yield":
        return [*(Instr(one.name, one.arg, location=at) for one in begins), Instr("JUMP_FORWARD", after, location=at)]
    inner = Instr("LOAD_FAST", STAND_IN, location=at)
    if what == "raise":  # (the local goes first: an exception's traceback leads to the frame)
        return [inner, Instr("DELETE_FAST", STAND_IN, location=at), Instr("RAISE_VARARGS", 1, location=at)]
    return [*call_sequence(inner, [], at), Instr("JUMP_FORWARD", after, location=at)]


def handle_again(name: str, at: Any) -> list[Any]:
    """Instructions that begin to handle the exception in a local as a handler does.

    Nothing is raised: that would change the exception's traceback and context. PUSH_EXC_INFO may stand anywhere
    (Python/bytecodes.c): it makes the value on the stack the handled exception.
    """
    load = Instr("LOAD_FAST", name, location=at)
    return [load, Instr("PUSH_EXC_INFO", location=at), Instr("POP_TOP", location=at)]


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
