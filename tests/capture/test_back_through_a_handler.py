"""A break whose native instruction raises, is handled in the frame, and is come to once more in a loop: the locals and
the stack are others then than where the rest of the frame was captured for."""

from __future__ import annotations

import abc
import contextlib
import os
import sys

import pytest
import torch

from moebius import capture, stats
from moebius.codegen.resume import Continuation


class Abstract(abc.ABC):
    @abc.abstractmethod
    def method(self):
        """None here."""


class Made(Abstract):
    def __new__(cls, value):
        return super().__new__(cls)


def risky(number, bad=1):
    """Is a graph break each time: C code of which capture knows nothing, or an error of C code."""
    return Made(number) if number == bad else len(os.urandom(number))


class Log:
    def __init__(self):
        self.seen = []

    def append(self, value):
        self.seen.append(value)


def a_local_that_the_handler_sets(x):
    for i in (1, 0, 2):
        try:
            value = risky(i)
        except TypeError:
            failed = i
            continue
        x = x * 2 + value
    return x, failed


def set_in_a_later_iteration(x):
    for i in range(4):
        try:
            value = risky(i, bad=2)
        except TypeError:
            failed = i
            continue
        x = x * 2 + value
    return x, failed


def a_local_that_the_handler_deletes(x):
    e = 5
    for i in (1, 0, 2):
        try:
            value = risky(i)
        except TypeError as e:  # noqa: F841
            continue
        x = x * 2 + value
    try:
        return x, e
    except UnboundLocalError:
        return x, "unbound"


def in_the_middle_of_a_method_call(x):
    out = []
    for i in (1, 0, 2):
        try:
            out.append(risky(i))
        except TypeError:
            out.append("no")
        x = x * 2
    return x, out


def a_method_of_pythons_and_then_one_of_cs(x):
    out = kept = Log()
    for i in (3, 1, 0, 2):
        try:
            out.append(risky(i))
        except TypeError:
            out = []
        x = x * 2
    return x, out, kept.seen


def with_stars(x):
    found = []
    for make, values in ((Made, (1,)), (min, (4, 3)), (Made, (1,)), (max, (4, 3))):
        try:
            found.append(make(*values))
        except TypeError as error:
            found.append(str(error))
    return x + 1, found


def in_a_block_that_suppresses(x):
    seen = []
    for i in (1, 0, 1, 2):
        with contextlib.suppress(TypeError):
            seen.append(-1)
            last = risky(i)
            x = x + last
    return x, seen, last


def in_two_loops(x):
    lost = 0
    for i in (1, 0):
        for j in (0, 1, 2):
            try:
                x = x * 2 + risky(i * j)
            except TypeError:
                lost += 1
                if lost > 1:
                    break
            finally:
                x = x + 1
        else:
            x = x * 10
    return x, lost


def a_while_loop_that_tries_again(x):
    tries, waiting = 0, [1, 1, 3]
    while True:
        try:
            value = risky(waiting[tries])
            break
        except TypeError as error:
            tries += 1
            message = str(error)[:10]
    return x * value, tries, message


def a_variable_of_an_inner_function(x):
    def read():
        return state

    for i in (1, 0):
        try:
            value = risky(i)
        except TypeError:
            state = "failed"
            continue
        x = x + value
    return x, read()


STEPS = [
    a_local_that_the_handler_sets, set_in_a_later_iteration, a_local_that_the_handler_deletes,
    in_the_middle_of_a_method_call, a_method_of_pythons_and_then_one_of_cs, with_stars, in_a_block_that_suppresses,
    in_two_loops, a_while_loop_that_tries_again, a_variable_of_an_inner_function,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_what_comes_back_is_plain_pythons(step, backend):
    captured = capture(step, backend=backend)
    for number in range(4):
        x = torch.full((2,), float(number))
        found, wanted = captured(x), step(x)
        assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:]


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2], STEPS[3], STEPS[5]], ids=lambda f: f.__name__)
def test_without_the_look_at_how_it_comes_back_it_is_not(monkeypatch, step):
    if step is a_local_that_the_handler_deletes and sys.version_info >= (3, 12):
        pytest.skip("C reads a local that is not there")
    monkeypatch.setattr(Continuation, "comes_back_otherwise", lambda self: False)
    try:
        found = capture(step, backend="eager")(torch.ones(2))
    except UnboundLocalError:
        return
    assert found[1:] != step(torch.ones(2))[1:]


def test_where_nothing_else_can_come_back_the_rest_is_captured():
    """A call by itself in a loop, and a handler that sets nothing: iterations after the error are captured ones."""

    def step(x, numbers):
        for i in numbers:
            try:
                value = risky(i)
            except TypeError:
                continue
            x = x * 2 + value
        return x

    captured = capture(step, backend="eager")
    for numbers in ([1, 0, 2], [0, 1, 2], [0, 2, 1]):
        assert torch.equal(captured(torch.ones(2), numbers), step(torch.ones(2), numbers))
    assert stats(captured).graphs >= 2
