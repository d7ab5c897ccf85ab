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


@pytest.mark.parametrize(
    "function", [in_a_sequence, asks_for_python_s_own, catches_all, one_around_the_other, asks_the_program]
)
def test_same_as_plain(function):
    x, captured = torch.randn(3), capture(function)
    for _ in range(3):
        EVENTS.clear()
        wanted = function(x), list(EVENTS)
        EVENTS.clear()
        found = captured(x), list(EVENTS)
        assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]
    assert (stats(captured).graphs == 1) == (function in (in_a_sequence, asks_for_python_s_own))
