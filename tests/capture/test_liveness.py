"""Which locals a frame still reads, against what running the rest of the frame needs."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import pytest

from moebius.bytecode.liveness import read_later


def here() -> None:
    """The place that the tests ask about: after the call of it."""


def overwritten(a, b):
    here()
    a = b + 1
    return a


def in_a_loop(rows):
    for row in rows:
        here()
        last = row
    return last


def on_one_way_only(a, b):
    here()
    if b:
        a = 1
    return a


def in_a_handler(a, b):
    try:
        here()
        a = b()
    except ValueError:
        return a
    return a


def deleted(a):
    here()
    del a


def in_a_cell(a):
    here()
    a = 1
    return lambda: a


def unnamed(a, b):
    here()
    a = 1  # noqa: F841
    return eval("a + b")


def swapped(a, b, c):
    here()
    a, b = b, c
    return a, b


CASES = [
    (overwritten, {"b"}), (in_a_loop, {"row"}), (on_one_way_only, {"a", "b"}), (in_a_handler, {"a", "b"}),
    (deleted, {"a"}), (in_a_cell, {"a"}), (unnamed, {"a", "b"}), (swapped, {"b", "c"}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "wanted"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_what_is_read_later(function: Callable[..., Any], wanted: set[str]) -> None:
    instructions = [i for i in dis.get_instructions(function) if i.opname != "CACHE"]
    asked = next(n for n, i in enumerate(instructions) if i.argval == "here")
    after = next(n for n, i in enumerate(instructions) if n > asked and i.opname == "POP_TOP")
    assert read_later(function.__code__, after) == wanted
