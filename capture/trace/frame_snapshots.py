"""Frames of a trace that was left in the middle, and native code in which they go on.

Each frame but the innermost goes on after the call that it was in; the innermost raises, goes on after its instruction
with something else's result, or runs its instruction natively.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moebius.interpreter import ITERATOR_PLACES, NULL, UNSET, Frame, is_kind

from ..bytecode.hidden_frames import hidden
from ..bytecode.liveness import read_later
from ..bytecode.stack_layout import (
    callee_position,
    empty_places,
    handled_exceptions,
    handled_places,
    operands_popped,
    without_call_prefix,
)
from ..codegen.continuation_code import CannotResume, State, deferred_code
from ..codegen.rebuild_functions import named_as, over_cells
from ..codegen.residual import Emitter
from ..codegen.resume import is_held, live_names, refuse_cells
from ..python.construction import Making
from ..values.residual_program import Call, Expression, tuple_of
from ..values.values import SymbolicObject, TensorProxy, UndefinedAfterLoop


@dataclass
class FrameSnapshot:
    """One frame of a trace that was stopped: what stood on its stack before the instruction that it is in.

    handled: the exception that its innermost handler handles, if it is in one. making: where its instruction is the
    call of a class that has come to ``__init__``: that.
    """

    frame: Frame
    stack: list[Any]
    pc: int
    handled: BaseException | None = None
    making: Making | None = None

    def callee_position(self) -> int | None:
        """Where on the stack the callable of the call is that the frame is in, or None."""
        return callee_position(self.frame.program.instructions[self.pc], self.stack)


def connected(stopped: list[FrameSnapshot], generators: bool = False) -> list[FrameSnapshot]:
    """The outermost frames of which each was called by nothing but an instruction of the one before it.

    generators: whether a generator that the instruction does nothing but advance may be one of them.
    """
    for count in range(1, len(stopped)):
        outer, inner = stopped[count - 1 : count + 1]
        if not calls(outer, inner.frame) and not (generators and advances(outer, inner.frame)):
            return stopped[:count]
    return stopped


def advances(outer: FrameSnapshot, inner: Frame) -> bool:
    """Whether the outer frame's instruction is to advance the generator of the inner frame, and does nothing else."""
    name, stack = outer.frame.program.instructions[outer.pc].opname, outer.stack
    generator = inner.shell() if inner.shell is not None else None
    if generator is None or not stack:
        return False
    if name == "FOR_ITER":
        return stack[-ITERATOR_PLACES] is generator
    if name == "SEND":  # (a generator that has not begun takes nothing but None)
        return stack[-1 - ITERATOR_PLACES] is generator and stack[-1] is None
    position = outer.callee_position()
    if position is None or stack[position] is not next:
        return False
    return next((value for value in stack[position + 1 :] if value is not NULL), None) is generator


def calls(outer: FrameSnapshot, inner: Frame) -> bool:
    """Whether the outer frame's instruction calls the inner frame's function, and gives what that returns."""
    if inner.code.co_flags & 0x2A0:  # a generator or coroutine
        return False
    position = outer.callee_position()
    if position is None:
        return False
    callee = outer.stack[position]
    if outer.frame.program.instructions[outer.pc].opname == "CALL_FUNCTION_EX":
        arguments = next(value for value in outer.stack[position + 1 :] if value is not NULL)
        if type(arguments) not in (tuple, list):  # f(*map(f, xs)): the instruction goes through the iterator first
            return False
    if is_kind(callee, type):
        making = outer.making
        return making is not None and making.cls is callee and making.init is inner.code
    for _ in range(8):
        if is_kind(callee, types.MethodType):
            callee = callee.__func__
        elif is_kind(callee, functools.partial):
            callee = callee.func
        elif is_kind(callee, types.FunctionType):
            return callee.__code__ is inner.code
        elif is_kind(callee, type):  # behind a partial
            return False
        else:
            callee = getattr(type(callee), "__call__", None)  # noqa: B004
    return False


# What nobody can make again once the graph has run, or what is gone from it: not wanted where it is dead.
MAY_BE_GONE = (TensorProxy, UndefinedAfterLoop, SymbolicObject)


def continuation(emitter: Emitter, chain: list[FrameSnapshot], what: str, inner: Any) -> Expression:
    """An expression for a callable that goes on in these frames. what: the innermost frame's ("native_frame").

    inner: what the innermost raises or calls.
    """
    going_on: Expression = emitter.constant(inner)
    for caller, place in reversed(list(zip([None, *chain], chain, strict=False))):
        going_on = native_frame(emitter, place, going_on, what)
        what = "call"
        if place.frame.shell is not None:
            going_on, what = begun_generator(emitter, place.frame, going_on), "run"  # the instruction advances it
        elif caller is not None and caller.making is not None:
            partial, wrapper = emitter.constant(functools.partial), emitter.constant(initialised)
            going_on = Call(partial, (wrapper, emitter.value(caller.making.made), going_on))
    return going_on


@hidden
def initialised(made: Any, init: Callable[[], Any]) -> Any:
    """What the call of a class gives once the rest of ``__init__`` has run (Objects/typeobject.c type_call)."""
    given = init()
    if given is not None:
        raise TypeError(f"__init__() should return None, not '{type(given).__name__}'")
    return made


def begun_generator(emitter: Emitter, frame: Frame, begin: Expression) -> Expression:
    """A generator that goes on in the frame when it is advanced next, in the place of the frame's own one."""
    generator = frame.shell() if frame.shell is not None else None
    if generator is None or id(generator) in emitter.built:
        raise CannotResume("a generator that runs is held by what it holds")
    name = emitter.assign(generator, Call(begin))
    emitter.lines += named_as(name, generator)
    return name


def native_frame(emitter: Emitter, place: FrameSnapshot, inner: Expression, what: str) -> Call:
    """A callable that goes on in one frame.

    what: "raise" raises ``inner`` where the frame is; "call" calls it in place of the frame's instruction, and goes on
    after that; "run" runs the instruction as it is, without ``inner``.
    """
    frame, program = place.frame, place.frame.program
    index = without_call_prefix(program, place.pc)
    handler = program.handler_at(place.pc)
    starts = [handler[0]] if handler else []
    instead: tuple[str, int] | None
    if what == "raise":
        depth = handler[1] if handler else 0
        instead = ("raise", 0)
    elif what == "call":
        starts.append(place.pc + 1)
        depth = len(place.stack) - operands_popped(program.instructions[place.pc])
        instead = ("call", place.pc + 1)
    else:
        starts.append(index)
        depth, instead = len(place.stack), None
    slots = [(i, name) for i, name in enumerate(program.localsplus) if frame.locals[i] is not UNSET]
    live = {name for start in starts for name in live_names(frame.code, start)}
    later = {name for start in starts for name in read_later(frame.code, start)}
    bound = tuple(
        name
        for i, name in slots
        if i not in program.cell_indices
        and (name in live or is_held(name, frame.locals[i]))
        and (name in later or not is_kind(frame.locals[i], MAY_BE_GONE))
    )
    cells = tuple(name for i, name in enumerate(program.localsplus) if i in program.cell_indices)
    handled = tuple(p for p in handled_places(frame.code)[place.pc] if p < depth)
    refuse_cells(place.stack[:depth])
    nulls = empty_places(place.stack[:depth])
    state = State(index, bound, cells, depth, nulls, handled)
    every = handled_exceptions(place.stack, handled_places(frame.code)[place.pc], place.handled)
    where = {name: i for i, name in slots}
    values = [emitter.value(frame.locals[where[n]]) for n in bound]
    values += [emitter.value(every.get(i, v)) for i, v in enumerate(place.stack[:depth]) if i not in nulls]
    code = emitter.constant(deferred_code(frame.code, state, instead))
    if any(n not in where or not is_kind(frame.locals[where[n]], types.CellType) for n in cells if n in live):
        raise CannotResume("a cell is not made yet")
    closure = tuple_of(emitter.value(frame.locals[where[n]]) if n in live else Call("m_cell") for n in cells)
    function = over_cells(Call(code), emitter.constant(frame.globals), frame.code.co_name, closure)
    return Call(emitter.constant(functools.partial), (function, *values, *([inner] if instead else [])))
