"""Loops over dicts and sets with a graph break in each iteration: their iterators are what they are in plain Python,
and notice that what they walk over changes."""

from __future__ import annotations

import copy

import pytest
from answers import broken, told

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.codegen import residual

DICT = {"k": 2, "l": 3, "m": 4}
SET = {1, 2, 3, 99, 1000}


def keys(d, s):
    found = []
    for key in d:
        broken()
        found.append(key)
    return found


def items_backwards(d, s):
    found = []
    for key, item in reversed(d.items()):
        broken()
        found.append((key, item))
    return found


def grows(d, s):
    for key in d:
        broken()
        d[key + "x"] = 1


def grows_at_the_end(d, s):
    for number, _ in enumerate(d.values()):
        broken()
        if number == len(SET):
            d["one more"] = 1


def target_grows(d, s):
    for d[broken("broken")] in d:  # noqa: B020
        pass


def changed_before(d, s):
    d["n"], found = 5, []
    for item in d.values():
        broken()
        found.append(item)
    return found


def own_dict(d, s):
    mine = {"a": 1}
    for key in mine:
        broken()
        mine[key + "b"] = 2


def members(d, s):
    found = []
    for member in s:
        broken()
        found.append(member)
    return found


def set_grows(d, s):
    for member in s:
        broken()
        s.add(member + 100)


def own_set(d, s):
    mine = {5, 6, 7}
    for member in mine:
        broken()
        mine.discard(member)


PROGRAMS = [
    keys, items_backwards, grows, grows_at_the_end, target_grows, changed_before, own_dict, members, set_grows, own_set,
]  # fmt: skip


def check(program):
    captured = capture(program)
    ours, theirs = ((copy.copy(DICT), copy.copy(SET)) for _ in range(2))
    for _ in range(3):
        assert told(captured, *ours) == told(program, *theirs)
        assert [len(held) for held in ours] == [len(held) for held in theirs]
    assert report_of(captured_of(captured)).breaks


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_plain_python_walks(program):
    check(program)


@pytest.mark.parametrize("program", [grows, target_grows, own_dict, set_grows, own_set])
def test_as_walks_over_lists_they_notice_nothing(program, monkeypatch):
    monkeypatch.setattr(residual, "WALKS", {})
    with pytest.raises(AssertionError):
        check(program)
