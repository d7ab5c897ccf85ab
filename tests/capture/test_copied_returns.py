"""Ends of a function that the compiler wrote more than once: each instruction of a copy has its twin in a later one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from moebius.bytecode.copied_returns import RETURNS, conditions_of_loops, copies
from moebius.bytecode.flow import joins, last_copy
from moebius.interpreter import decode


def both(x: Any) -> Any:
    if x > 0:
        y = x * 2
    else:
        y = x - 1
    return y + 1


def three(x: Any) -> Any:
    if x > 0:
        y = 1
    elif x < -1:
        y = 2
    else:
        y = 3
    return y


def within(x: Any) -> Any:
    if x > 0:
        y = 1 if x > 5 else 2
    else:
        y = 3
    return y


def nothing(x: Any) -> None:
    if x > 0:
        x.add(1)
    else:
        x.add(2)


def two_returns(x: Any) -> Any:
    if x > 0:
        return x + 1
    return x + 1


def guarded(x: Any) -> Any:
    """The same words, within a handler and behind it."""
    try:
        if x > 0:
            y = 1
        else:
            y = 2
        return y + 1
    finally:
        x.clear()


EACH = [both, three, within, nothing, two_returns, guarded]


@pytest.mark.parametrize("function", EACH, ids=lambda f: f.__name__)
def test_a_copy_does_what_the_later_one_does(function: Callable[..., Any]) -> None:
    program = decode(function.__code__)
    places = list(function.__code__.co_positions())
    for here, later in copies(program).items():
        a, b = program.instructions[here], program.instructions[later]
        assert here < later and (a.opcode, a.arg) == (b.opcode, b.arg) and a.target is b.target is None
        assert program.handler_at(here) == program.handler_at(later)
        assert places[a.offset // 2] == places[b.offset // 2] or function is nothing
        assert a.opname in RETURNS or copies(program)[here + 1] == later + 1  # to their ends


def test_what_the_compiler_copies_is_found() -> None:
    assert copies(decode(nothing.__code__)) and not copies(decode(two_returns.__code__))
    found = [function for function in (both, three, within) if copies(decode(function.__code__))]
    assert found == ([both, three, within] if sys.version_info >= (3, 13) else found)


def counted(count: int, run: Any) -> int:
    at = -1
    while at < count - 1:
        at += 1
        if run(at):
            continue
        run(-at)
    return at


def of_two(first: int, second: int, run: Any) -> int:
    while first and second > 2:
        first -= 1
        if run(first):
            continue
        second -= 1
    return second


def waiting(items: Any, run: Any) -> None:
    while (item := items.pop()) is not None:
        if run(item):
            continue
        run(item)


def never(run: Any) -> None:
    while True:
        if run(1):
            continue
        if run(2):
            break


@pytest.mark.parametrize("function", [counted, of_two, waiting], ids=lambda f: f.__name__)
def test_where_continue_meets_the_end_of_an_iteration(function: Callable[..., Any]) -> None:
    """In the condition, which stands before the loop and at its end."""
    program = decode(function.__code__)
    jumps = [i for i, one in enumerate(program.instructions) if one.target is not None and "_IF_" in one.opname]
    inside = [i for i in jumps if i not in copies(program) and i not in copies(program).values()]
    if sys.version_info >= (3, 14):  # whose compiler has the condition once
        assert not copies(program) and len(inside) == len(jumps)
        return
    (jump,) = inside
    assert any(joins(program)[jump] == last_copy(program, first) > jump > first for first in copies(program))


def test_a_loop_without_condition_has_none() -> None:
    assert not conditions_of_loops(decode(never.__code__), {})
