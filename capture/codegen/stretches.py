"""How far a frame runs natively from a graph break on: numpy code in a row is one break.

What numpy makes is no tensor, so the next instruction that computes with it would be a break again. The instructions
behind the broken one are looked at, in a straight line and with what is known of their operands; the native part ends
behind the last of them that computes with arrays and plain values alone and leaves no array on the stack; where a
branch asks for what it computed, the branch belongs to it. (It is the user's own code, so that running more of it
natively changes nothing but where the next graph begins.)
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

from moebius.interpreter import UNSET, Frame, is_kind

from ..bytecode.liveness import accesses
from ..regions.branches import BRANCHES
from ..tensors.arrays import Array, ArrayNumber
from ..values.values import ATOMS, SYMBOLIC, TensorMethod, type_of

# What computes with arrays, is one or holds some; a number or text; a function that gives a number or text; a function
# that gives a container of what it is given; any other object.
ARRAY, PLAIN, FUNCTION, CONTAINER, OTHER = "array", "plain", "function", "container", "other"
MOVES = frozenset(("NOP", "RESUME", "CACHE", "PRECALL", "KW_NAMES", "EXTENDED_ARG"))
BUILDS = frozenset(("BUILD_TUPLE", "BUILD_LIST", "BUILD_SLICE", "BUILD_MAP", "BUILD_CONST_KEY_MAP"))
TEXTS = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE", "BUILD_STRING"))
COMPUTES = frozenset((
    "BINARY_OP", "COMPARE_OP", "BINARY_SUBSCR", "BINARY_SLICE", "UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_NOT",
    "TO_BOOL",
))  # fmt: skip
ENDS = ("STORE_FAST", "POP_TOP", "STORE_SUBSCR", "STORE_SLICE")  # how the names begin
PLAIN_FUNCTIONS = (int, float, len, bool, range, slice, round, str)
CONTAINERS = (dict, list, tuple)


class Held(str):
    """OTHER, of which the object is known: what its attributes are can be read."""

    value: Any


def kind_of(value: Any) -> str:
    """What a value of a frame is to a stretch."""
    if any(value is function for function in PLAIN_FUNCTIONS):
        return FUNCTION
    if any(value is container for container in CONTAINERS):
        return CONTAINER
    if (known := kind_alone(value)) is OTHER and type(value).__getattribute__ is object.__getattribute__:
        held = Held(OTHER)
        held.value = value
        return held
    return known


def kind_of_attribute(base: str, name: str) -> str | None:
    """The kind of ``base.name``, None where it is not known without running anybody's code."""
    if base == ARRAY or not is_kind(base, Held):
        return base if base == ARRAY else None
    lookup = [cls.__dict__ for cls in type(base.value).__mro__]
    slot = next((names["__dict__"] for names in lookup if "__dict__" in names), None)
    own = slot.__get__(base.value) if type(slot) is types.GetSetDescriptorType else {}
    return kind_of(own[name]) if name in own and not any(name in names for names in lookup) else None


def kind_in(cell: Any) -> str:
    """The kind of what a cell holds."""
    try:
        return kind_of(cell.cell_contents) if type(cell) is types.CellType else OTHER
    except ValueError:  # nothing
        return OTHER


def kind_alone(value: Any) -> str:
    kind = type(value)
    if kind in (Array, ArrayNumber) or (kind is TensorMethod and value.name == "numpy"):
        return ARRAY
    if kind in SYMBOLIC or kind is slice or kind in ATOMS:
        return PLAIN
    owner = value.__self__ if kind is types.BuiltinMethodType else None
    if owner is not None and not is_kind(owner, types.ModuleType):
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

    def end(self) -> tuple[int, int]:
        """The index of the last instruction that runs natively, and how many values at the bottom of the stack it and
        those before it leave as they are."""
        last = at = self.frame.pc
        untouched = self.untouched
        handler, computed = self.program.handler_at(at), False
        asked = False  # whether what was computed is part of the expression that goes on
        while at < len(self.program.instructions) and self.program.handler_at(at) == handler:
            step = self.step(self.program.instructions[at])
            if step is None:
                break
            computed |= step
            asked = (asked or computed) and not self.program.instructions[at].opname.startswith(ENDS)
            if (computed and self.may_end(at)) or (asked and self.is_branched_on(at)):
                last, computed, untouched = at, False, self.untouched
            at += 1
        return last, untouched

    def may_end(self, at: int) -> bool:
        """Whether no array is on the stack behind this instruction, but one that is returned at once."""
        made = self.stack[self.untouched :]
        if made == [ARRAY]:
            return self.program.instructions[at + 1].opname == "RETURN_VALUE"
        return all(kind == PLAIN for kind in made)

    def is_branched_on(self, at: int) -> bool:
        made = self.stack[self.untouched :]
        return made in ([ARRAY], [PLAIN]) and self.program.instructions[at + 1].opname in BRANCHES

    def step(self, instruction: Any) -> bool | None:
        """Whether the instruction computes with arrays; None where the stretch ends before it."""
        name, stack = instruction.opname, self.stack
        if name in MOVES:
            return False
        if "FAST" in name:
            return self.use_locals(instruction)
        if name.startswith("LOAD_") or name == "PUSH_NULL":
            return self.load(instruction)
        if name == "COPY":
            stack.append(stack[-instruction.arg])
        elif name == "SWAP":
            found = self.take(instruction.arg)
            stack += [found[-1], *found[1:-1], found[0]]
        elif name == "POP_TOP":
            self.take(1)
        elif name == "CALL":
            return self.call(instruction.arg)
        elif name == "CALL_KW":
            self.take(1)
            return self.call(instruction.arg)
        elif name == "UNPACK_SEQUENCE":
            if self.take(1) != [ARRAY]:
                return None
            stack += [ARRAY] * instruction.arg
        elif name in BUILDS:
            self.replace(1 - dis.stack_effect(instruction.opcode, instruction.arg))
        elif name in TEXTS:
            taken = self.take(1 - dis.stack_effect(instruction.opcode, instruction.arg))
            if not {ARRAY, PLAIN}.issuperset(taken):
                return None
            stack.append(PLAIN)
            return ARRAY in taken
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

    def use_locals(self, instruction: Any) -> bool | None:
        for kind, name in accesses(instruction):
            if kind == "LOAD":
                self.stack.append(self.locals.get(name, OTHER))
            elif kind == "STORE":
                (self.locals[name],) = self.take(1)
            else:
                return None
        return None if instruction.opname == "LOAD_FAST_AND_CLEAR" else False

    def load(self, instruction: Any) -> bool | None:
        name, stack, frame = instruction.opname, self.stack, self.frame
        grows = 1 if name == "PUSH_NULL" else dis.stack_effect(instruction.opcode, instruction.arg)
        if name == "PUSH_NULL":
            found = OTHER
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            found = PLAIN
        elif name == "LOAD_GLOBAL":
            value = frame.globals.get(instruction.argval, frame.builtins.get(instruction.argval))
            found = kind_of(value)
        elif name == "LOAD_DEREF":
            found = kind_in(frame.locals[self.program.localsplus.index(instruction.argval)])
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            (base,), grows = self.take(1), grows + 1
            of_base = kind_of_attribute(base, instruction.argval)
            if of_base is None:
                return None
            found = of_base
        else:
            return None
        stack += [found] * grows
        return False

    def call(self, count: int) -> bool | None:
        """A function or method of numpy's, whatever it is given; a plain one, of an array or a constant."""
        taken = self.take(count + 2)
        callee, arguments = taken[:2], taken[2:]
        by_array = ARRAY in callee
        if not by_array and (not {FUNCTION, CONTAINER} & set(callee) or not {ARRAY, PLAIN}.issuperset(arguments)):
            return None
        self.stack.append(PLAIN if FUNCTION in callee else ARRAY)
        return by_array or ARRAY in arguments

    def replace(self, count: int, alone: bool = False) -> bool | None:
        """``count`` values become one. alone: they must be arrays and plain values."""
        taken = self.take(count)
        if alone and not {ARRAY, PLAIN}.issuperset(taken):
            return None
        self.stack.append(ARRAY if ARRAY in taken else PLAIN if OTHER not in taken else OTHER)
        return ARRAY in taken


def native_end(frame: Frame) -> tuple[int, int]:
    """``Stretch.end`` of the instruction where the frame broke."""
    return Stretch(frame).end() if "numpy" in sys.modules else (frame.pc, 0)
