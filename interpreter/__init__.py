"""Python's bytecode semantics: one machine for every supported version, parametrised by a domain. No torch in here.

`interpret(fn)` is the concrete domain's front: plain Python, interpreted. `decode` gives Programs, `Machine` runs
Frames, `Domain` is what capture subclasses. Opcode handlers live in opcodes/, version tables in tables/, the meaning of
operations in domain/, interpreted forms of C callables in forms/; native/ hands the machine Python functions that C
code calls back; natives.py lists what still runs natively.
"""
from __future__ import annotations

from .private_builtins import private_builtins

with private_builtins(__name__):
    from .decode import decode
    from .domain import Domain
    from .domain.containers import MEASURING
    from .errors import InterpreterError, Signal
    from .frame import Frame, opened
    from .interpret import interpret
    from .kinds import is_kind
    from .machine import Machine
    from .natives import count_native_frames
    from .program import Instruction, Program
    from .sentinels import NULL, STOP, UNSET
    from .tables import ITERATOR_PLACES

__all__ = [
    "ITERATOR_PLACES", "MEASURING", "NULL", "STOP", "UNSET", "Domain", "Frame", "Instruction", "InterpreterError",
    "Machine", "Program", "Signal", "count_native_frames", "decode", "interpret", "is_kind", "opened",
]  # fmt: skip
