"""sys.settrace in an interpreted program: the events are the native ones."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from moebius.interpreter import interpret


def traced(function: Callable[[], Any]) -> list[Any]:
    events: list[Any] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "exception":
            argument = argument[0].__name__, str(argument[1]), argument[2].tb_lineno - code.co_firstlineno
        events.append((code.co_name, event, frame.f_lineno - code.co_firstlineno, argument))
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(old)
    return events


def loop() -> int:
    total = 0
    for n in range(3):
        if n == 1:
            continue
        total += n
    while total > 0: total -= 1  # noqa: E701
    return total


def calls() -> list[int]:
    def double(n: int) -> int:
        return n * 2

    return [double(1),
            double(2)]  # fmt: skip


def handlers() -> str:
    try:
        try:
            raise KeyError("k")
        except ValueError:
            return "no"
        finally:
            ""
    except KeyError as error:
        return str(error)


def inner() -> None:
    raise LookupError("far")


def from_below() -> None:
    try:
        inner()
    except LookupError:
        pass


def generators() -> list[int]:
    def count(n: int) -> Any:
        while n:
            yield n
            n -= 1

    return list(count(2))


def matches() -> str:
    match ["go", 1]:
        case ["stay", _]:
            return "stay"
        case ["go", x] if x > 1:
            return "far"
        case _:
            return "else"


class Manager:
    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *details: Any) -> bool:
        return True


MANAGER = Manager()


def managed() -> int:
    with MANAGER:
        raise OSError("swallowed")
    return 1


@pytest.mark.parametrize("function", [loop, calls, handlers, from_below, generators, matches, managed])
def test_events_as_native(function: Callable[[], Any]) -> None:
    native = traced(function)
    assert len(native) > 5
    assert interpret(traced)(function) == native


def test_a_trace_function_that_raises_is_taken_off() -> None:
    def failing(frame: Any, event: str, argument: Any) -> Any:
        raise ZeroDivisionError("in the trace")

    def program() -> Any:
        sys.settrace(failing)
        try:
            loop()
        except ZeroDivisionError as error:
            return str(error), sys.gettrace()
        finally:
            sys.settrace(None)

    assert interpret(program)() == program() == ("in the trace", None)


def test_only_frames_that_begin_later_and_no_trace_function_are_traced() -> None:
    def program() -> list[str]:
        seen: list[str] = []

        def helper() -> None:
            pass

        def trace(frame: Any, event: str, argument: Any) -> None:
            helper()
            seen.append(frame.f_code.co_name + " " + event)  # no local trace function: no further events

        sys.settrace(trace)
        loop()
        sys.settrace(None)
        loop()
        return seen

    assert interpret(program)() == program() == ["loop call"]


def test_what_is_left_on_is_on_natively_afterwards_and_can_be_switched_off() -> None:
    seen: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    old = sys.gettrace()
    interpret(lambda: sys.settrace(trace))()
    try:
        loop()
        assert interpret(sys.gettrace)() is sys.gettrace() is trace
        interpret(sys.settrace)(None)
        assert sys.gettrace() is None
    finally:
        sys.settrace(old)
    assert "loop" in seen
