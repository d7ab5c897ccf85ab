"""Real generator, coroutine and async generator objects around interpreted frames.

A shell is a native generator whose body only resumes the frame: the protocol (send, throw, close, running and finished
states, finalizers, isinstance) is CPython's own. One native function a kind; its code is copied with the user
function's name, place and flags, so that warnings and repr read right.
"""
from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from itertools import chain, islice
from sys import get_coroutine_origin_tracking_depth
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

from .frame import Frame, opened
from .program import Forget
from .protocols import Machine

CO_GENERATOR, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR = 0x20, 0x80, 0x100, 0x200


class Wrapped:
    """A value that an async generator hands to its consumer."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Passed:
    """Awaitable that yields one value to the event loop as it is, and gives back what is sent."""

    __slots__ = ("value", "done")

    def __init__(self, value: Any) -> None:
        self.value, self.done = value, False

    def __await__(self) -> Passed:
        return self

    def __iter__(self) -> Passed:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self.done:
            raise StopIteration(value)
        self.done = True
        value, self.value = self.value, None
        return value

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> Any:
        raise kind if value is None else value


def take_value(frame: Frame) -> Any:
    """What the frame yielded, or was sent. A suspended generator holds on to neither."""
    value, frame.value = frame.value, None
    return value


def generator_body(machine: Machine, frame: Frame) -> Generator[Any, Any, Any]:
    """The body of generators and of coroutines."""
    thrown: list[BaseException] = []
    machine.resume(frame, None)
    while frame.suspended:
        try:
            frame.value = yield take_value(frame)
        except BaseException as error:
            thrown.append(error)
        # outside the except block: the interpreted program must not find this exception natively handled
        if thrown:
            machine.throw(frame, thrown.pop())
        else:
            machine.resume(frame, take_value(frame))
    return take_value(frame)


async def async_generator_body(machine: Machine, frame: Frame) -> AsyncGenerator[Any, Any]:
    thrown: list[BaseException] = []
    machine.resume(frame, None)
    while frame.suspended:
        try:
            if type(frame.value) is Wrapped:
                frame.value = yield take_value(frame).value
            else:
                frame.value = await Passed(take_value(frame))  # type: ignore[misc]  # an iterator, if not a Generator
        except BaseException as error:
            thrown.append(error)
        if thrown:
            machine.throw(frame, thrown.pop())
        else:
            machine.resume(frame, take_value(frame))


# id of a live code object of a shell's or of a frame object's -> references to it, and to the user's
USER_CODES: dict[int, tuple[ref[CodeType], ref[CodeType]]] = {}


def stands_for(made: CodeType, code: CodeType) -> CodeType:
    """Keep that `made` is to be shown as the user's `code`."""
    USER_CODES[id(made)] = ref(made, Forget(id(made), USER_CODES)), ref(code)
    return made


def user_code(code: CodeType) -> CodeType:
    """The user's code object for one of the machine's, as long as there is one; any other code object is itself."""
    known = USER_CODES.get(id(code))
    return code if known is None else known[1]() or code


def frame_of(generator: Any) -> Frame | None:
    """The interpreted frame of a live shell, None for a finished one and for native generators."""
    native = native_frame(generator)
    if native is None or native.f_globals is not globals():
        return None
    return native.f_locals.get("frame")


def native_frame(generator: Any) -> Any:
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        native = getattr(generator, name, None)
        if native is not None:
            return native
    return None


def shell_code(code: CodeType) -> CodeType:
    """The native body with the user code's name, place and flags."""
    kinds = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE
    body = async_generator_body if code.co_flags & CO_ASYNC_GENERATOR else generator_body
    own = body.__code__
    return own.replace(
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_flags=(own.co_flags & ~kinds) | (code.co_flags & kinds),
    )


def make_shell(machine: Machine, frame: Frame) -> Any:
    """The object that a call of the frame's generator function returns."""
    program = frame.program
    if program.shell is None:
        program.shell = stands_for(shell_code(frame.code), frame.code)
    # the module's own globals mark the native frame as the machine's, for tracebacks
    shell = FunctionType(program.shell, globals())(machine, frame)
    name = frame.function.__name__ if frame.function is not None else frame.code.co_name
    qualname = frame.function.__qualname__ if frame.function is not None else frame.code.co_qualname
    shell.__name__, shell.__qualname__ = name, qualname
    frame.exc_item = [None, None]
    frame.shell = ref(shell)
    depth = get_coroutine_origin_tracking_depth()
    if depth and frame.code.co_flags & CO_COROUTINE:
        frame.origin = origin(machine, frame.back, depth)
    frame.back = None
    return shell


def origin(machine: Machine, frame: Frame | None, depth: int) -> tuple[tuple[str, int | None, str], ...]:
    """Objects/genobject.c compute_cr_origin: the places that made the coroutine, the innermost first."""
    ours = ((one.code, one.line) for one in opened(frame))
    natives = ((native.f_code, native.f_lineno) for native in machine.callers())
    places = islice(chain(ours, natives), depth)
    return tuple((code.co_filename, line, code.co_name) for code, line in places)
