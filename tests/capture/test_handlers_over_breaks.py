"""A break at what raises, in a try or with: the handler around it catches what a Python function raises there.

Native code begins in the middle of the block; 3.13 looks for the handler at the code unit before the instruction that
has made the function's frame.
"""

import sys
from contextlib import suppress

import pytest
from answers import broken, told

from moebius import capture
from moebius.codegen import continuation_code

TURNS = 60  # natively run instructions are specialized: they then run Python functions without a call from C


def raises(n):
    n.total = 0  # (a break: the error's own words)


class Reads:
    @property
    def part(self):
        raises(3)

    def __getitem__(self, index):
        raises(index)


def iterations(n):
    yield 1
    raises(n)


def by_a_call(n):
    try:
        return raises(n)
    except AttributeError as error:
        return str(error)


def by_a_call_with_keywords(n):
    try:
        return raises(n=n)
    except AttributeError as error:
        return str(error)


def by_a_call_with_all(n):
    try:
        return raises(*[n])
    except AttributeError as error:
        return str(error)


def by_a_property(read):
    found = []
    try:
        found.append(read.part)
    except AttributeError as error:
        found.append(str(error))
    return found


def by_an_item(read):
    try:
        return read[4]
    except AttributeError as error:
        return str(error)


def by_a_generator(n):
    seen = []
    try:
        for iteration in iterations(n):
            seen.append(iteration)
            broken()
    except AttributeError as error:
        seen.append(str(error))
    return seen


def in_a_with(n):
    with suppress(AttributeError):
        raises(n)
    with suppress(AttributeError):
        broken(n)
        raises(n)
    return n


def behind_a_break(n):
    try:
        broken(n)
        raises(n)
    except AttributeError as error:
        return str(error)
    finally:
        broken(n)


def in_a_handler(n):
    try:
        raises(n)
    except AttributeError:
        try:
            raises(str(n))
        except AttributeError as error:
            return str(error), str(error.__context__)


CASES = [
    (by_a_call, 3), (by_a_call_with_keywords, 3), (by_a_call_with_all, 3), (by_a_property, Reads()),
    (by_an_item, Reads()), (by_a_generator, 3), (in_a_with, 3), (behind_a_break, 3), (in_a_handler, 3),
]  # fmt: skip


@pytest.mark.parametrize("function, argument", CASES, ids=[f.__name__ for f, _ in CASES])
def test_is_caught(function, argument):
    captured = capture(function)
    expected = told(function, argument)
    assert all(told(captured, argument) == expected for _ in range(TURNS))


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="of 3.13's compiler")  # (before and since, none begins so)
def test_a_region_that_begins_with_the_call_does_not_catch(monkeypatch):
    monkeypatch.setattr(continuation_code, "BEGINS_REGION", ())
    assert told(capture(by_a_call), 3) != told(by_a_call, 3)
