"""How far a frame runs natively from a graph break on: numpy code in a row is one break.

What numpy makes is no tensor, so the next instruction that computes with it would be a break again. The instructions
behind the broken one are looked at, in a straight line and with what is known of their operands; the native part ends
behind the last of them that ends a statement and computes with arrays and plain values alone. (It is the user's own
code, so that running more of it natively changes nothing but where the next graph begins.)
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

from moebius.interpreter import UNSET, Frame

from ..tensors.arrays import Array, ArrayNumber
from ..values.values import ATOMS, SYMBOLIC, TensorMethod, type_of

ARRAY, PLAIN, OTHER = "array", "plain", "other"  # what computes with arrays, or is one; a constant; anything else
MOVES = frozenset(("NOP", "RESUME", "CACHE", "PRECALL", "KW_NAMES", "EXTENDED_ARG"))
BUILDS = frozenset(("BUILD_TUPLE", "BUILD_LIST", "BUILD_SLICE"))
COMPUTES = frozenset(("BINARY_OP", "COMPARE_OP", "BINARY_SUBSCR", "BINARY_SLICE", "UNARY_NEGATIVE", "UNARY_INVERT"))
ENDS = frozenset(("STORE_FAST", "POP_TOP", "STORE_SUBSCR", "STORE_SLICE"))
PLAIN_FUNCTIONS = (int, float, len, bool, range, slice)


def kind_of(value: Any) -> str:
    """What a value of a frame is to a stretch."""
    kind = type(value)
    if kind in (Array, ArrayNumber) or (kind is TensorMethod and value.name == "numpy"):
        return ARRAY
    if kind in SYMBOLIC or kind is slice or kind in ATOMS:
        return PLAIN
    owner = value.__self__ if kind is types.BuiltinMethodType else None
    if owner is not None and not isinstance(owner, types.ModuleType):
        return kind_of(owner)
    if kind is types.ModuleType:
        module = value.__name__
    elif kind in (types.FunctionType, types.BuiltinFunctionType):
        module = value.__module__
    else:  # (asked of classes alone, past what they have of their own: nobody's code runs)
        module = type.__getattribute__(value if issubclass(kind, type) else type_of(value), "__module__")
    return ARRAY if str(module).partition(".")[0] == "numpy" else OTHER


class Stretch:
    """The walk over one frame's instructions from the broken one on."""

    def __init__(self, frame: Frame):
        self.frame, self.program = frame, frame.program
        self.stack = [kind_of(value) for value in frame.stack]
        self.untouched = len(self.stack)  # how many of the values at the bottom are those that stood there at the break
        self.locals = {
            name: kind_of(value)
            for name, value in zip(self.program.localsplus, frame.locals, strict=True)
            if value is not UNSET
        }

    def end(self) -> int:
        """The index of the last instruction that runs natively."""
        last = at = self.frame.pc
        handler, computed = self.program.handler_at(at), False
        while at < len(self.program.instructions) and self.program.handler_at(at) == handler:
            step = self.step(self.program.instructions[at])
            if step is None:
                break
            computed |= step
            if self.program.instructions[at].opname in ENDS and len(self.stack) == self.untouched and computed:
                last, computed = at, False
            at += 1
        return last

    def step(self, instruction: Any) -> bool | None:
        """Whether the instruction computes with arrays; None where the stretch ends before it."""
        name, stack = instruction.opname, self.stack
        if name in MOVES:
            return False
        if name.startswith("LOAD_") or name == "PUSH_NULL":
            return self.load(instruction)
        if name == "COPY":
            stack.append(stack[-instruction.arg])
        elif name == "SWAP":
            found = self.take(instruction.arg)
            stack += [found[-1], *found[1:-1], found[0]]
        elif name == "STORE_FAST":
            (self.locals[instruction.argval],) = self.take(1)
        elif name == "POP_TOP":
            self.take(1)
        elif name == "CALL":
            return self.call(instruction.arg)
        elif name in BUILDS:
            self.replace(instruction.arg)
        elif name in COMPUTES:
            return self.replace(1 - dis.stack_effect(instruction.opcode, instruction.arg), alone=True)
        elif name in ("STORE_SUBSCR", "STORE_SLICE"):
            taken = self.take(3 if name == "STORE_SUBSCR" else 4)
            return True if OTHER not in taken and ARRAY in taken else None
        else:
            return None
        return False

    def take(self, count: int) -> list[str]:
        """The topmost values, which are gone from the stack."""
        rest = len(self.stack) - count
        taken = self.stack[rest:]
        del self.stack[rest:]
        self.untouched = min(self.untouched, rest)
        return taken

    def load(self, instruction: Any) -> bool | None:
        name, stack = instruction.opname, self.stack
        grows = 1 if name == "PUSH_NULL" else dis.stack_effect(instruction.opcode, instruction.arg)
        if name == "PUSH_NULL":
            found = OTHER
        elif name == "LOAD_CONST":
            found = PLAIN
        elif name in ("LOAD_FAST", "LOAD_FAST_CHECK"):
            found = self.locals.get(instruction.argval, OTHER)
        elif name == "LOAD_GLOBAL":
            value = self.frame.globals.get(instruction.argval, self.frame.builtins.get(instruction.argval))
            found = PLAIN if any(value is one for one in PLAIN_FUNCTIONS) else kind_of(value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            (found,), grows = self.take(1), grows + 1
            if found is not ARRAY:
                return None
        else:
            return None
        stack += [found] * grows
        return False

    def call(self, count: int) -> bool | None:
        """A function or method of numpy's, whatever it is given; a plain one, of an array or a constant."""
        taken = self.take(count + 2)
        callee, arguments = taken[:2], taken[2:]
        by_array = ARRAY in callee
        if not by_array and (PLAIN not in callee or ARRAY not in arguments or OTHER in arguments):
            return None
        self.stack.append(ARRAY if by_array else PLAIN)
        return True

    def replace(self, count: int, alone: bool = False) -> bool | None:
        """``count`` values become one. alone: they must be arrays and plain values."""
        taken = self.take(count)
        if alone and (OTHER in taken or ARRAY not in taken):
            return None
        self.stack.append(ARRAY if ARRAY in taken else PLAIN if OTHER not in taken else OTHER)
        return ARRAY in taken


def native_end(frame: Frame) -> int:
    """The index of the last instruction that runs natively where this one broke."""
    return Stretch(frame).end() if "numpy" in sys.modules else frame.pc
