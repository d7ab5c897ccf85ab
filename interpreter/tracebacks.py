"""Tracebacks that show the user's files, lines and functions, and none of the machine's frames.

A traceback entry needs a real frame object. It comes from running a stub natively: the user's code object with its first
instructions replaced by "return sys._getframe()", so that names, lines, columns and globals are the user's.
"""
from __future__ import annotations

import sys
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from .decode import Program
from .frame import Frame

SET_TRACEBACK = BaseException.__dict__["__traceback__"].__set__
GET_TRACEBACK = BaseException.__dict__["__traceback__"].__get__
SET_CONTEXT = BaseException.__dict__["__context__"].__set__
GET_CONTEXT = BaseException.__dict__["__context__"].__get__
MACHINE_PREFIXES: tuple[str, ...] = ("moebius.interpreter",)


def hide_module(prefix: str) -> None:
    """Native frames of modules whose name starts with `prefix` are left out of interpreted tracebacks."""
    global MACHINE_PREFIXES
    MACHINE_PREFIXES = (*MACHINE_PREFIXES, prefix)


def stub_template(get_frame: Any) -> FrameType:
    return get_frame()  # type: ignore[no-any-return]


def stub_code(code: CodeType) -> CodeType:
    """`code` with its beginning replaced by stub_template's body; one positional parameter."""
    own = stub_template.__code__
    length = len(own.co_code)
    return own.replace(
        co_code=own.co_code + code.co_code[length:],
        co_linetable=code.co_linetable,
        co_firstlineno=code.co_firstlineno,
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_exceptiontable=b"",
    )


def stub_frame(program: Program, globals_: dict[str, Any]) -> FrameType:
    """A real, finished frame object of the program's code under the given globals."""
    if program.stub is None:
        program.stub = stub_code(program.code)
    return FunctionType(program.stub, globals_)(sys._getframe)  # type: ignore[no-any-return]


def strip(trace: TracebackType | None) -> TracebackType | None:
    """Drop the machine's entries. Those behind a stub entry have been cleaned by the frame that made it."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not is_machine_module(trace.tb_frame):
            kept.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for entry in reversed(kept):
        if entry.tb_next is not result:
            entry = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        result = entry
    return result


def is_machine_module(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(MACHINE_PREFIXES)


def add_entry(frame: Frame, following: TracebackType | None) -> TracebackType:
    """A traceback entry for `frame` at its current instruction."""
    instruction = frame.instruction
    line = instruction.line
    native = stub_frame(frame.program, frame.globals)
    return TracebackType(following, native, instruction.offset, line if line is not None else frame.code.co_firstlineno)


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
