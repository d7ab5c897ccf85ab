"""Code object -> Program: instructions with folded arguments, jump targets as indices, the exception table by index.

A code object is decoded once.
"""
from __future__ import annotations

import dis
import sys
from types import CodeType
from typing import Any
from weakref import ref

from .natives import call_outside
from .private_builtins import private_copy
from .program import Forget, Instruction, Program
from .reading import LOOKS_BACK, Read, read_instructions
from .registry import HANDLERS
from .tables import TABLE
from .tables.caches import ends_within_an_instruction
from .verify import refuse, verify

READER = private_copy("dis")
SKIPPED = frozenset({"EXTENDED_ARG"})
JUMPS = frozenset(op for op in (*dis.hasjrel, *dis.hasjabs) if dis.opname[op] not in LOOKS_BACK)


PROGRAMS: dict[int, Program] = {}  # by the id of a live code object
FORGET: dict[int, ref[CodeType]] = {}


def decode(code: CodeType) -> Program:
    """The Program of `code`, made at the first request and forgotten with the code object."""
    program = PROGRAMS.get(id(code))
    if program is None:
        program = PROGRAMS[id(code)] = call_outside(_decode, code)
        FORGET[id(code)] = ref(code, Forget(id(code), PROGRAMS, FORGET))
    return program


def _decode(code: CodeType) -> Program:
    program = Program(code)
    read, regions = read_code(program)
    index_of, instructions, steps = program.index_of, program.instructions, program.steps
    kept = [ins for ins in read if ins.opname not in SKIPPED]
    count = 0
    for ins in read:
        index_of[ins.offset] = count  # an EXTENDED_ARG's offset names the instruction it extends
        count += ins.opname not in SKIPPED
    extended = {ins.offset + 2 for ins in read if ins.opname in SKIPPED}
    for index, ins in enumerate(kept):
        opname, arg, argval = ins.opname, ins.arg, ins.argval
        entry = TABLE.get(opname)
        if entry is None:
            refuse(program, undecoded(index, ins), "the machine knows no such instruction")
        if arg is not None and arg < 0:
            refuse(program, undecoded(index, ins), "no compiler emits that argument")
        target = None
        if ins.opcode in JUMPS:
            target = index_of.get(argval)
            if target is None or target >= count or argval in extended:
                refuse(program, undecoded(index, ins), "no instruction begins at its target")
        try:
            operand = entry.form(code, ins, target)
        except LookupError:
            refuse(program, undecoded(index, ins), "its argument refers to nothing")
        opname = entry.name_for(opname, arg)
        if opname == "LOAD_CONST":
            argval = operand  # whichever table it is in
        instructions.append(Instruction(index, opname, ins.opcode, arg, argval, target, ins.offset, ins.line, operand))
        steps.append((HANDLERS[entry.handler_for(arg)], operand))
    handlers: list[tuple[int, int, bool] | None] = [None] * count
    for region in regions:
        start, target, end = index_of.get(region.start), index_of.get(region.target), index_of.get(region.end)
        if end is None and region.end == len(code.co_code):
            end = count
        if start is None or end is None or target is None or target >= count or region.target in extended:
            refuse(program, None, f"an exception table's entry fits no instructions: {region}")
        handlers[start:end] = [(target, region.depth, bool(region.lasti))] * (end - start)
    program.handlers = handlers
    verify(program)
    return program


def undecoded(index: int, ins: Read) -> Instruction:
    return Instruction(index, ins.opname, ins.opcode, ins.arg, ins.argval, None, ins.offset, ins.line)


def read_code(program: Program) -> tuple[list[Read], list[Any]]:
    """The instructions, and dis's reading of the exception table."""
    code = program.code
    if ends_within_an_instruction(code):
        refuse(program, None, "it ends within an instruction")
    try:
        regions = READER.Bytecode(code).exception_entries if code.co_exceptiontable else []
        return read_instructions(code, program.localsplus), regions
    except Exception as error:
        refuse(program, None, f"it cannot be read: {type(error).__name__}: {error}")


def check_tables() -> None:
    """ImportError naming the first opcode of the running Python that has no handler."""
    missing = [
        name
        for name in emitted_opcodes()
        if name not in TABLE or any(handler not in HANDLERS for handler in TABLE[name].handlers())
    ]
    if missing:
        raise ImportError(
            f"moebius.interpreter has no handler for {', '.join(missing)} of Python {sys.version.split()[0]}"
        )


def emitted_opcodes() -> list[str]:
    """The names of the opcodes that a code object of the running Python may hold (no pseudo or instrumented ones)."""
    return [
        name
        for name, op in dis.opmap.items()
        if op < 256 and name not in SKIPPED and not name.startswith("INSTRUMENTED_") and name not in UNEMITTED
    ]


# Internal to CPython: they never stand in co_code.
UNEMITTED = frozenset({
    "CACHE", "INTERPRETER_EXIT", "RESERVED", "ENTER_EXECUTOR", "DO_TRACING", "EXIT_INIT_CHECK", "TRACE_RECORD",
})  # fmt: skip
