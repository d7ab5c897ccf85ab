"""Which iterators a ``for`` statement alone has: on its frame's stack, and nowhere else.

A loop that is recorded as one node, or whose branch goes on to the end of the function in the graph, leaves its
iterator where it is, so nobody else may see how far it went. That is known from how the iterator came to be: GET_ITER
made it of a container, or takes what the call right before it made (``enumerate``, ``zip``, ``reversed``), of
containers or of what such calls made.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Sequence
from typing import Any

from moebius.interpreter import Frame, Instruction

from ..bytecode.liveness import falls_through
from ..bytecode.stack_layout import without_call_prefix
from ..heap.iterator_states import cloned
from ..heap.walks import parts_of

MAKERS = (enumerate, zip, reversed)


class LoopIterators:
    def __init__(self, domain: Any):
        self.domain, self.objects = domain, domain.objects
        self.last: tuple[int, int] | None = None  # ids: the container that was last gone through, its iterator
        self.inner: set[int] = set()  # ids of iterators that an enumerate or zip has made for itself
        self.made: dict[int, tuple[weakref.ref[Frame], int]] = {}  # by id of an enumerate, …: what instruction made it
        self.alone: dict[int, weakref.ref[Frame]] = {}  # by id (each is alive as long as the trace is): whose loop's

    def begins(self, operand: Any, iterator: Any) -> Any:
        """``iter(operand)`` is an iterator that C code has just made of a container."""
        self.objects.made(iterator)
        self.last = id(operand), id(iterator)
        if (frame := self.asking(operand)) is not None:
            self.alone[id(iterator)] = weakref.ref(frame)
        return iterator

    def passes(self, iterator: Any) -> None:
        """``iter(iterator)``, which is itself."""
        frame = self.asking(iterator)
        if frame is not None and self.is_made_before(frame, frame.pc, iterator):
            self.alone[id(iterator)] = weakref.ref(frame)

    def takes(self, operand: Any, iterator: Any) -> None:
        """An enumerate or zip was given an operand, for which it has asked for the iterator just now."""
        if self.last == (id(operand), id(iterator)):
            self.inner.add(id(iterator))

    def makes(self, iterator: Any) -> Any:
        """A call has made an enumerate, zip, or what ``reversed`` gives."""
        frame = self.domain.frame
        if frame is not None:
            self.made[id(iterator)] = weakref.ref(frame), frame.pc
        return iterator

    def asking(self, operand: Any) -> Frame | None:
        """The frame whose instruction asks for the operand's iterator, where that is GET_ITER."""
        frame = self.domain.frame
        asks = frame is not None and frame.program.instructions[frame.pc].opname == "GET_ITER"
        return frame if asks and frame.stack[-1] is operand else None

    def is_alone(self, frame: Frame, at: int) -> bool:
        """Whether what is there in the frame's stack is nowhere else."""
        held = self.alone.get(id(frame.stack[at]))
        return held is not None and held() is frame

    def can_be_cloned(self, frame: Frame) -> bool:
        """Whether those of the loops around the instruction can be advanced on one side of a branch alone."""
        return all(self.is_alone(frame, i) and cloned(frame.stack[i]) is not None for i in places(frame))

    def clone(self, frame: Frame) -> None:
        """The frame goes on with others at the same places."""
        for i in places(frame):
            frame.stack[i] = cloned(frame.stack[i])
            for part in parts_of(frame.stack[i]):
                self.objects.made(part)
            self.alone[id(frame.stack[i])] = weakref.ref(frame)

    def is_made_before(self, frame: Frame, end: int, iterator: Any) -> bool:
        """Whether the frame's instruction before that index has made it in a call, and nobody else has its parts."""
        steps = frame.program.instructions
        maker, call = self.made.get(id(iterator)), end - 1
        if maker is None or maker[0]() is not frame or maker[1] != call:
            return False
        begin = without_call_prefix(frame.program, call)
        count = (steps[call].arg or 0) + (steps[call].opname == "CALL_KW")
        arguments = operands(frame, begin, count)
        if arguments is None or end in targets(frame) or steps[call].opname not in ("CALL", "CALL_KW"):
            return False
        callee = (arguments[0][0] if arguments else begin) - 1
        callee -= steps[callee].opname == "PUSH_NULL"
        name, known = steps[callee].argval, steps[callee].opname == "LOAD_GLOBAL"
        if not known or not any(frame.globals.get(name, frame.builtins.get(name)) is kind for kind in MAKERS):
            return False
        if type(iterator) not in (enumerate, zip):
            return True
        parts = iterator.__reduce__()[1]
        parts = parts[:1] if type(iterator) is enumerate else parts
        return all(
            id(part) in self.inner or self.is_made_before(frame, given[1], part)
            for part, given in zip(parts, arguments, strict=False)
        )


def places(frame: Frame) -> list[int]:
    """Where on the stack the iterators are of the loops that run."""
    return [i for i, value in enumerate(frame.stack) if hasattr(type(value), "__next__")]


def targets(frame: Frame) -> set[int | None]:
    return {step.target for step in frame.program.instructions} - {None}


def operands(frame: Frame, end: int, count: int) -> list[tuple[int, int]] | None:
    """For each of the topmost values on the stack before an instruction: from where to where those stand that put it
    there. None where several ways lead there."""
    steps: Sequence[Instruction] = frame.program.instructions
    joined, found, at, more = targets(frame), [], end, 0
    for _ in range(count):
        stop, missing = at, 1 - more
        while missing > 0:
            if at == 0 or at in joined or not falls_through(steps[at - 1]) or steps[at - 1].opname in ("COPY", "SWAP"):
                return None
            at -= 1
            step = steps[at]
            missing -= dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        more = -missing  # (one instruction may load two locals, of which one belongs to the operand below)
        found.append((at, stop))
    return None if more else found[::-1]

