"""A special method that a class gains or loses between two calls, and what asks for it without a look-up in sight."""

from __future__ import annotations

import copy
import copyreg
import itertools

import pytest
import torch
from answers import same

from moebius import capture
from moebius.python.attributes import Attributes


def matched(c):
    match c:
        case 3:
            return 2
        case _:
            return 1


def unpacked(c):
    first, *others = c
    a, b = c
    return first * 2 + len(others) + a * b


def asked(question, c):
    try:
        return question(c)
    except TypeError as error:
        return str(error)[:20]


def always(self, other):
    return True


QUESTIONS = {
    "callable": (callable, "__call__", always),
    "to a number": (lambda c: c == 3, "__eq__", always),
    "from a number": (lambda c: 3 == c, "__eq__", always),
    "unequal": (lambda c: c != 3, "__eq__", always),
    "unequal by its own": (lambda c: c != 3, "__ne__", lambda self, other: False),
    "in a list": (lambda c: c in [1, 2], "__eq__", always),
    "in a tuple": (lambda c: 5 in (c,), "__eq__", always),
    "index": (lambda c: [1, c].index(c), "__eq__", always),
    "count": (lambda c: [1, 2].count(c), "__eq__", always),
    "lists": (lambda c: [c] == [3], "__eq__", always),
    "tuples": (lambda c: (c, 1) == (3, 1), "__eq__", always),
    "dicts": (lambda c: {"a": c} == {"a": 3}, "__eq__", always),
    "match": (matched, "__eq__", always),
    "unpacked": (unpacked, "__iter__", lambda self: iter([4, 3])),
    "starred": (lambda c: max(*c), "__iter__", lambda self: iter([4, 3])),
    "item of a class": (lambda c: c[1], "__class_getitem__", classmethod(lambda cls, key: key + 1)),
    "deepcopy": (lambda c: copy.deepcopy(c).v, "__deepcopy__", lambda self, memo: Other()),
}
NAMES = list(itertools.product(QUESTIONS, ("class", "base", "metaclass")))


class Other:
    v = 2


def world():
    class Meta(type):
        pass

    class Base:
        v = 1

    class Made(Base, metaclass=Meta):
        pass

    return Made, {"class": Made, "base": Base, "metaclass": Meta}


def run(call, name, place):
    question, method, definition = QUESTIONS[name]
    cls, places = world()
    c = cls if place == "metaclass" or name == "item of a class" else cls()
    step, found = call(lambda x: (x * 2, asked(question, c))), []
    for change in (None, None, setattr, None, delattr, None, setattr):
        if change is not None:
            change(places[place], method, *(() if change is delattr else (definition,)))
        found.append(step(torch.ones(2)))
    return found


@pytest.mark.parametrize(("name", "place"), NAMES)
def test_as_in_python(name, place):
    assert same(run(lambda step: step, name, place), run(capture, name, place))


@pytest.mark.parametrize("name", ["callable", "in a tuple", "match", "unpacked", "item of a class"])
def test_without_the_guard_it_is_missed(name, monkeypatch):
    monkeypatch.setattr(Attributes, "rely_on", lambda self, cls, *names: None)
    assert not same(run(lambda step: step, name, "class"), run(capture, name, "class"))


@pytest.mark.parametrize("method", ["__deepcopy__", "__reduce_ex__", "__getstate__"])
@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy])
def test_an_object_that_says_how_it_is_copied(function, method):
    def run(call):
        c, found = Other(), []
        c.v = 1
        step = call(lambda x: (x * 2, function(c).v))
        for i in range(4):
            if i == 2:
                vars(c)[method] = lambda *given: (Other, ()) if method == "__reduce_ex__" else Other()
            try:
                found.append(step(torch.ones(2)))
            except Exception as error:
                found.append(type(error))
        return found

    assert same(run(lambda step: step), run(capture))


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy])
def test_a_class_that_copyreg_gets_to_know(function):
    def run(call):
        class Made(Other):
            pass

        c, found = Made(), []
        c.v = 1
        step = call(lambda x: (x * 2, function(c).v))
        for i in range(4):
            if i == 2:
                copyreg.pickle(Made, lambda made: (Other, ()))
            found.append(step(torch.ones(2)))
        del copyreg.dispatch_table[Made]
        return found

    assert same(run(lambda step: step), run(capture))
