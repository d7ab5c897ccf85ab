"""What a first call was given dies with it: no trace of ours holds on to it until garbage is collected. Ways to be
given × ways for the call to end; and generators that the caller suspended while it handles an exception."""
from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from answers import broken

from moebius import capture

LOG: list[str] = []


class Thing:
    def __init__(self):
        self.scale, self.x = 2, torch.ones(3)


class Told(Exception):
    pass


ENDS = {
    "returns": lambda y: y + 1,
    "breaks": lambda y: (broken(), y + 1)[1],
    "raises": lambda y: (y + 1).view(7),
    "is an error of Python's": lambda y: (y + 1).missing,
}


def used(thing, end):
    return end(thing.x * thing.scale)


def told(error, end):
    return end(error.args[0].x * 2)


def by_argument(run, end):
    thing = Thing()
    run(used, thing, end)
    return thing


def by_exception(run, end):
    try:
        raise Told(Thing())
    except Told as error:
        run(told, error, end)
        return error.args[0]


def beside_an_exception(run, end):
    thing = Thing()
    try:
        raise Told(thing)
    except Told:
        run(used, Thing(), end)
    return thing


@pytest.fixture(autouse=True)
def without_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run_captured(function, *args):
    captured = capture(function)
    for _ in range(3):
        try:
            captured(*args)
        except (RuntimeError, AttributeError):
            pass


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("given", [by_argument, by_exception, beside_an_exception])
def test_it_dies(given, end):
    dead = weakref.ref(given(run_captured, ENDS[end]))
    assert dead() is None


def logged(error):
    LOG.append(str(error))


def finishing():
    try:
        yield 1
    finally:
        LOG.append("closed")


def within(kind):
    def inside():
        values = finishing()
        next(values)
        try:
            raise kind("told")
        except kind as error:
            logged(error)

    def around():
        try:
            values = finishing()
            next(values)
            raise kind("told")
        except kind as error:
            logged(error)

    def before():
        values = finishing()
        y = torch.ones(2) * next(values)
        try:
            raise kind("told")
        except kind as error:
            logged(error)
        return y

    return inside, around, before


@pytest.mark.parametrize("place, kind", list(itertools.product(range(3), [ValueError, KeyError, Told])))
def test_generators_are_closed_where_their_frame_ends(place, kind):
    function = within(kind)[place]
    captured = capture(function)
    for _ in range(3):
        LOG.clear()
        function()
        expected = list(LOG)
        LOG.clear()
        captured()
        assert LOG == expected
