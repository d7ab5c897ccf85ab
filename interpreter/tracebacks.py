"""Tracebacks that show the user's files, lines and functions, and none of the machine's frames.

A traceback entry needs a real frame object. It is the frame of a native generator that never runs, whose code object
has the user's names, file, lines and columns: a frame without a caller, cheap to make.
"""
from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any
from weakref import ref

from .frame import FRESH_LOCALS, Frame
from .natives import DICT_GET, call_outside, fill_frame, is_a, link_frame, set_frame_names
from .program import Program
from .sentinels import UNSET
from .shells import USER_CODES, stands_for

SET_TRACEBACK = BaseException.__dict__["__traceback__"].__set__
GET_TRACEBACK = BaseException.__dict__["__traceback__"].__get__
SET_CONTEXT = BaseException.__dict__["__context__"].__set__
GET_CONTEXT = BaseException.__dict__["__context__"].__get__
GENERATORS_LINKED = (3, 12) <= sys.version_info < (3, 14)
CO_OPTIMIZED, CO_NEWLOCALS, CO_VARARGS, CO_VARKW = 0x01, 0x02, 0x04, 0x08
MACHINE_PREFIX = "moebius.interpreter"


def stub_template() -> Any:
    yield


GENERATOR_PROLOGUE = stub_template.__code__.co_code[:2]  # RETURN_GENERATOR
PAST_RESUME = 2 if sys.version_info >= (3, 13) else 0  # from 3.13 a frame's position is the instruction after


def stub_code(program: Program, code: CodeType, pc: int) -> CodeType:
    """The user's code object as a generator that stands at instruction `pc`, with the same variables.

    A module's or class body's has no variables: it has a namespace.
    A generator that never ran reports the place of its first RESUME (Python/frame.c take_ownership): it goes there.
    Up to 3.12 what is in a cell is looked up where a MAKE_CELL stands before that place (_PyFrame_OpAlreadyRan).
    An argument shares its slot with its cell: then the stub has parameters, else it has none.
    """
    place = place_of_resume(program.instructions[pc].offset)
    own, has_names = stub_template.__code__, program.optimized
    filled = stub_instructions(code, place)
    if has_names:
        made = b"".join(map(make_cell, sorted(program.cell_indices)))[: place - len(GENERATOR_PROLOGUE)]
        filled[len(GENERATOR_PROLOGUE) : len(GENERATOR_PROLOGUE) + len(made)] = made
    return named_as(code, filled).replace(
        co_flags=own.co_flags if has_names else own.co_flags & ~(CO_OPTIMIZED | CO_NEWLOCALS),
        co_argcount=parameters(code) if has_names else 0,
        co_nlocals=len(code.co_varnames) if has_names else 0,
        co_varnames=code.co_varnames if has_names else (),
        co_cellvars=code.co_cellvars if has_names else (),
        co_freevars=code.co_freevars if has_names else (),
    )


def place_of_resume(offset: int) -> int:
    return max(offset - PAST_RESUME, len(GENERATOR_PROLOGUE))


def stub_instructions(code: CodeType, place: int) -> bytearray:
    filled = bytearray(bytes((dis.opmap["NOP"], 0)) * (len(code.co_code) // 2))  # as long as its line table says
    filled[: len(GENERATOR_PROLOGUE)] = GENERATOR_PROLOGUE
    filled[place : place + 2] = bytes((dis.opmap["RESUME"], 0))
    return filled


def named_as(code: CodeType, instructions: bytearray) -> CodeType:
    """A generator's code of these instructions, with no variables, and the places and names of another one."""
    return stub_template.__code__.replace(
        co_code=bytes(instructions),
        co_linetable=code.co_linetable,
        co_firstlineno=code.co_firstlineno,
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_exceptiontable=b"",
    )


def entries_of(trace: TracebackType | None, end: TracebackType | None = None) -> Iterator[TracebackType]:
    """The entries of a traceback, up to `end`: that of the outermost frame first."""
    while trace is not None and trace is not end:
        yield trace
        trace = trace.tb_next


def linked(entries: Sequence[TracebackType], rest: TracebackType | None = None) -> TracebackType | None:
    """A traceback of these entries and the rest; an entry that leads on so already is in it itself."""
    for entry in reversed(entries):
        if entry.tb_next is not rest:
            entry = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        rest = entry
    return rest


def places_of(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the same places, whose frame objects have no variables and no callers."""
    found: TracebackType | None = None
    for entry in reversed([*entries_of(trace)]):
        code = entry.tb_frame.f_code
        stub = named_as(code, stub_instructions(code, place_of_resume(entry.tb_lasti)))
        native = call_outside(FunctionType(stub, entry.tb_frame.f_globals)).gi_frame
        found = TracebackType(found, native, entry.tb_lasti, entry.tb_lineno)
    return found


class Note:
    """What a frame object of `stub_frame`'s knows of the frame that it is of: its function's __doc__."""

    __slots__ = ("code", "frame", "back", "line", "lasti")

    def __init__(self, frame: Frame) -> None:
        self.code = frame.code  # it lives as long as the frame object
        self.frame = ref(frame)
        self.back = None if frame.back is None else ref(frame.back)
        self.line: int | None = None  # where the frame ended, and the program had its frame object
        self.lasti = -1


def note_of(native: FrameType) -> Note | None:
    for function in gc.get_referents(native):
        if type(function) is FunctionType and function.__code__ is native.f_code and type(function.__doc__) is Note:
            return function.__doc__
    return None


def caller_of(native: FrameType) -> Frame | None:
    """The interpreted frame that called the one of a frame object of `stub_frame`'s, while there is one."""
    note = note_of(native)
    return None if note is None or note.back is None else note.back()


def outlive(native: FrameType, frame: Frame) -> None:
    """The frame ends, its frame object does not: it keeps what CPython's does (take_ownership, Python/frame.c).

    That is the variables, the caller's frame object (not a generator's on 3.11: gen_send_ex2 has cut the link), and up
    to 3.12 the dict that locals() gave.
    """
    fill(native, frame)
    back = frame.back if frame.exc_item is None or GENERATORS_LINKED else None
    if back is not None and back.native is None:
        back.native = stub_frame(back, False)
    kept = frame.program.optimized and not FRESH_LOCALS
    if FRESH_LOCALS and frame.locals_dict:
        native.f_locals.update(frame.locals_dict)
    link_frame(native, None if back is None else back.native, frame.locals_dict if kept else None)


def make_cell(index: int) -> bytes:
    unit = bytes((dis.opmap["MAKE_CELL"], index & 255))
    return unit if index < 256 else bytes((dis.opmap["EXTENDED_ARG"], index >> 8)) + unit


def parameters(code: CodeType) -> int:
    """How many parameters the stub has: those of the code object, where one of them is a cell."""
    names = code.co_varnames[: arguments_of(code)]
    return len(names) if any(name in names for name in code.co_cellvars) else 0


def arguments_of(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKW)


def stub_frame(frame: Frame, filled: bool) -> FrameType:
    """A real frame object of the interpreted frame's code, at its current instruction; `filled`: with its variables."""
    program, pc = frame.program, frame.pc
    if program.stubs is None:
        program.stubs = {}
    code = program.stubs.get(pc)
    if code is None:
        code = program.stubs[pc] = stands_for(stub_code(program, frame.code, pc), frame.code)
    cells = frame.closure if code.co_freevars else None
    given = [None] * code.co_argcount
    function = FunctionType(code, frame.globals, closure=cells)
    function.__doc__ = Note(frame)  # type: ignore[assignment]
    native = call_outside(function, *given).gi_frame
    if not program.optimized:
        set_frame_names(native, frame.names)
    if filled:
        outlive(native, frame)
    elif given or cells:
        empty(native, frame)
    return native


def fill(native: FrameType, frame: Frame) -> None:
    """The frame object gets the interpreted frame's variables and cells; a module's or class body's has them always."""
    if frame.program.optimized:
        fill_frame(native, frame.locals or [UNSET] * len(frame.program.localsplus), UNSET)


def empty(native: FrameType, frame: Frame) -> None:
    """The variables are the interpreted frame's alone again; the cells from outside stay: CPython takes it that a frame
    that has begun has them (up to 3.12: _PyFrame_FastToLocalsWithError)."""
    if frame.program.optimized:
        cells = (frame.closure or ()) if native.f_code.co_freevars else ()
        fill_frame(native, [UNSET] * (len(frame.program.localsplus) - len(cells)) + [*cells], UNSET)


def strip(trace: TracebackType | None, clean: TracebackType | None) -> TracebackType | None:
    """Drop the machine's entries, up to `clean`: an entry from which on the traceback is known to be clean."""
    kept: list[TracebackType] = []
    for entry in entries_of(trace, clean):
        trace = entry.tb_next
        if not is_machine_module(entry.tb_frame):
            kept.append(entry)
        elif (fresh := fresh_frame(entry.tb_frame)) is not None:
            kept.append(add_entry(fresh, None, True))
    return linked(kept, trace)


def without_first(trace: TracebackType | None, count: int) -> TracebackType | None:
    while trace is not None and count:
        trace, count = trace.tb_next, count - 1
    return trace


def fresh_frame(native: FrameType) -> Frame | None:
    """The interpreted frame of a generator's shell that was thrown into before it ever ran."""
    if id(native.f_code) not in USER_CODES:
        return None
    frame = native.f_locals.get("frame")
    return frame if is_a(frame, Frame) and frame.instruction.opname == "RETURN_GENERATOR" else None


def thrown_into_fresh(trace: TracebackType | None, clean: TracebackType | None) -> bool:
    """Whether the exception comes out of a generator that never ran: it raised it, with its own context."""
    entered = (entry.tb_frame for entry in entries_of(trace, clean))
    return any(is_machine_module(frame) and fresh_frame(frame) is not None for frame in entered)


def converted_by_shell(exc: BaseException) -> bool:
    """Whether C code has just made this error of a StopIteration that left a shell (PEP 479).

    It then has its context. The StopIteration has been through the shell as well: that is taken off its traceback.
    """
    stop = GET_CONTEXT(exc)
    if not is_a(exc, RuntimeError) or not is_a(stop, (StopIteration, StopAsyncIteration)):
        return False
    trace = GET_TRACEBACK(stop)
    clean = strip(trace, None)
    SET_TRACEBACK(stop, clean)
    return clean is not trace


def is_machine_module(frame: FrameType) -> bool:
    name = DICT_GET(frame.f_globals, "__name__", None)
    return is_a(name, str) and name.startswith(MACHINE_PREFIX)


def add_entry(frame: Frame, following: TracebackType | None, ends: bool) -> TracebackType:
    """A traceback entry for `frame` at its current instruction; a frame that ends keeps its locals in it."""
    instruction = frame.instruction
    line = instruction.line
    if ends:
        native = frame.native  # (`drop_locals` fills it)
        here = None if native is None else (frame.program.stubs or {}).get(frame.pc)
        if native is None or native.f_code is not here or frame.domain.keeps_frames:
            native = stub_frame(frame, True)
    else:
        native = frame.native = frame.native or stub_frame(frame, False)
    return TracebackType(following, native, instruction.offset, line if line is not None else frame.code.co_firstlineno)


def with_variables(frame: Frame, trace: TracebackType) -> TracebackType:
    """The traceback of what `frame` raises again as it ends: its entry, made when it went on, gets its locals."""
    if trace.tb_frame.f_code not in (frame.program.stubs or {}).values():
        return trace
    return TracebackType(trace.tb_next, stub_frame(frame, True), trace.tb_lasti, trace.tb_lineno)


def chain_context(exc: BaseException, handled: BaseException | None) -> None:
    """_PyErr_SetObject: what is being handled becomes the context of a newly raised exception, without cycles."""
    if handled is None or handled is exc:
        return
    walk: BaseException = handled
    slow, step = handled, False
    while (context := GET_CONTEXT(walk)) is not None:
        if context is exc:
            SET_CONTEXT(walk, None)
            break
        walk = context
        if walk is slow:
            break
        if step:
            slow = GET_CONTEXT(slow)
        step = not step
    SET_CONTEXT(exc, handled)
