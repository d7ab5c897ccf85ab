"""What a captured function raises has what its caller is handling as context, whoever called it first."""

from __future__ import annotations

import pytest
from answers import broken

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.interpreter import Machine
from moebius.python import methods
from moebius.trace.trace import TracingMachine


def caught():
    try:
        raise ValueError(5)
    except ValueError as error:
        return error


def caught_across_a_break():
    try:
        raise ValueError(5)
    except ValueError as error:
        broken()
        return error


def asked():
    try:
        raise ValueError(5)
    except ValueError as error:
        return error.__context__


def raised():
    raise ValueError(5)


def wrong_clause():
    try:
        raise ExceptionGroup("k", [KeyError(1)])
    except* 0:  # noqa: B030
        pass


def raised_in_a_handler():
    try:
        raise ValueError(5)
    except ValueError:
        raise KeyError(3)  # noqa: B904


PROGRAMS = [caught, caught_across_a_break, asked, raised, wrong_clause, raised_in_a_handler]


def chain(function):
    """The exception that the function raises or returns, and its contexts."""
    found = []
    try:
        error = function()
    except BaseException as one:
        error = one
    while error is not None:
        found.append(repr(error))
        error = error.__context__
    return found


def handling(function):
    try:
        return 1 / 0
    except ZeroDivisionError:
        return chain(function)


def check(program, order):
    captured = capture(program)
    for call in order:
        assert call(captured) == call(program)


@pytest.mark.parametrize("order", [(chain, handling, chain), (handling, chain, handling)], ids=["plain", "handling"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_plain_python(program, order):
    check(program, order)


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program is not raised])
def test_without_the_guard_the_first_call_decides(program, monkeypatch):
    monkeypatch.setattr(TracingMachine, "unwind", Machine.unwind)
    with pytest.raises(AssertionError):
        check(program, (chain, handling))


def swallowed(x):
    try:
        return x + [1][2]
    except IndexError:
        return x + 1


def test_where_no_exception_is_seen_one_capture_serves_all():
    """A step that is tried again in an ``except`` clause, with a smaller batch."""
    captured = capture(swallowed)
    assert captured(1) == 2
    try:
        raise ValueError
    except ValueError:
        assert captured(1) == 2
    assert stats(captured).misses == 1 and not report_of(captured_of(captured)).breaks


def thrown_through_a_generator():
    """`throw` hands on what it is given; `close` raises its own GeneratorExit where it is called."""

    def generator():
        yield 1

    try:
        raise ValueError(5)
    except ValueError:
        suspended = generator()
        next(suspended)
        try:
            suspended.throw(GeneratorExit(3))
        except GeneratorExit as error:
            return error


@pytest.mark.parametrize("with_form", [True, False])
def test_what_is_thrown_into_a_generator_keeps_its_context(with_form, monkeypatch):
    if not with_form:
        monkeypatch.setattr(methods, "form_of", lambda bound: None)
    same = chain(capture(thrown_through_a_generator)) == chain(thrown_through_a_generator)
    assert same == with_form
