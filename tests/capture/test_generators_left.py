"""Generators that the step leaves suspended inside a try-block: Python closes them, which may run what is in it."""

from __future__ import annotations

import collections.abc

import pytest
import torch

from moebius import capture, stats

EVENTS = []


class Pair(collections.abc.Sequence):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return ("a", "b", "c")[index]


def in_a_sequence(x):
    return x * 2 if "b" in Pair() else x


def asks_for_python_s_own(x):
    def numbers():
        try:
            yield 1
        except ValueError:
            EVENTS.append("ValueError")
        except KeyError:
            EVENTS.append("KeyError")

    return x * next(numbers())


def catches_all(x):
    def numbers():
        try:
            yield 1
        except BaseException:
            EVENTS.append("closed")
            raise

    return x * next(numbers())


def one_around_the_other(x):
    def numbers():
        try:
            try:
                yield 1
            except KeyError:
                pass
        finally:
            EVENTS.append("finally")

    return x * next(numbers())


class Asked(Exception):
    pass


def asks_the_program(x):
    def which():
        EVENTS.append("which")
        return Asked

    def numbers():
        try:
            yield 1
        except which():
            pass

    return x * next(numbers())


class Closes:
    """An iterator of the program's that is told when the generator which yields from it is gone."""

    def __iter__(self):
        return self

    def __next__(self):
        return 2

    def close(self):
        EVENTS.append("closed")


def yields_from_one_that_closes(x):
    def numbers():
        yield from Closes()

    first = next(numbers())
    EVENTS.append("after")
    return x * first


def yields_from_another_generator(x):
    inner = (number for number in (1, 2, 3))

    def numbers():
        yield from inner

    first = next(numbers())
    EVENTS.append(next(inner, "ended"))
    return x * first


def yields_from_a_list(x):
    def numbers():
        yield from [1, 2]

    return x * next(numbers())


IN_THE_GRAPH = [in_a_sequence, asks_for_python_s_own, yields_from_a_list]
NATIVE = [
    catches_all,
    one_around_the_other,
    asks_the_program,
    yields_from_one_that_closes,
    yields_from_another_generator,
]


@pytest.mark.parametrize("function", IN_THE_GRAPH + NATIVE)
def test_same_as_plain(function):
    x, captured = torch.randn(3), capture(function)
    for _ in range(3):
        EVENTS.clear()
        wanted = function(x), list(EVENTS)
        EVENTS.clear()
        found = captured(x), list(EVENTS)
        assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
    assert (stats(captured).graphs == 1) == (function in IN_THE_GRAPH)
