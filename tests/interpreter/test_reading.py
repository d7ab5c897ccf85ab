"""The instructions of a code object as the machine reads them, against dis."""

from __future__ import annotations

import dis
import importlib.util
from pathlib import Path
from types import CodeType

from moebius.interpreter.program import Program
from moebius.interpreter.reading import read_instructions

# every opcode and every kind of argument; _pydecimal has EXTENDED_ARG
MODULES = ("argparse", "ast", "dataclasses", "enum", "inspect", "_pydecimal", "typing", "asyncio.streams", "contextlib")
# dis's argval of these is a converter, or unknown, or (of the last, from 3.15 on) the constant
TEXTS = {"FORMAT_VALUE", "CONVERT_VALUE", "KW_NAMES", "LOAD_COMMON_CONSTANT"}


def codes_in(code: CodeType) -> list[CodeType]:
    return [code, *(found for const in code.co_consts if isinstance(const, CodeType) for found in codes_in(const))]


def test_reading_is_what_dis_reads() -> None:
    opcodes, arguments = set(), []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        for code in codes_in(compile(Path(spec.origin).read_bytes(), spec.origin, "exec")):
            theirs = list(dis.Bytecode(code))
            ours = read_instructions(code, Program(code).localsplus)
            assert len(ours) == len(theirs)
            for mine, their in zip(ours, theirs, strict=True):
                assert (mine.offset, mine.opcode, mine.opname, mine.arg) == their_fields(their)
                assert their.positions is not None and mine.line == their.positions.lineno
                if mine.opname not in TEXTS:
                    assert repr(mine.argval) == repr(their.argval), (mine, their)
                opcodes.add(mine.opname)
                arguments.append(mine.arg or 0)
    assert len(opcodes) > 75 and max(arguments) > 255 and {"EXTENDED_ARG", "COMPARE_OP", "FOR_ITER"} <= opcodes


def their_fields(ins: dis.Instruction) -> tuple[int, int, str, int | None]:
    return ins.offset, ins.opcode, ins.opname, ins.arg
