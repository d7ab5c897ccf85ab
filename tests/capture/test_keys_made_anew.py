"""Objects that each call is given anew, as keys of dicts and sets that the step makes: which are one is asked alone."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.heap.identities import Identities


class Plain:
    def __init__(self, number: int):
        self.number = number


class Hashed(Plain):
    def __hash__(self) -> int:
        return hash(self.number)


class Slotted(Plain):
    __slots__ = ("other",)


class Equal(Hashed):
    def __eq__(self, other: Any) -> bool:
        return self.number == other.number

    __hash__ = Hashed.__hash__


class Model(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number


def added(items: list) -> Any:
    found = set()
    for item in items:
        found.add(item)
    return len(found), [item in found for item in items]


def displays(items: list) -> Any:
    a, b, c = items
    return len({a, b, c}), len({a: 1, b: 2, c: 3})


def numbered(items: list) -> Any:
    found = {}
    for number, item in enumerate(items):
        found[item] = number
    return [(item.number, number) for item, number in found.items()]


def met_before(items: list) -> Any:
    met, out = set(), []
    for item in items:
        out.append(0 if item in met else item.number)
        met.add(item)
    return out


def in_order(items: list) -> Any:
    found = set()
    for item in items:
        found.add(item)
    return [item.number for item in found]


def updated(items: list) -> Any:
    found = set(items[:1])
    found.update(items[1:])
    return len(found), len(frozenset(items)), items[0] in frozenset(items[1:])


def together(items: list) -> Any:
    left, right = set(), set()
    for item in items[:2]:
        left.add(item)
    for item in items[1:]:
        right.add(item)
    return len(left & right), len(left | right), len(left - right), left == right, left <= right


def counted(items: list) -> Any:
    found: dict = defaultdict(int)
    for item in items:
        found[item] += 1
    return sorted(found.values()), len(dict.fromkeys(items))


def grouped(items: list) -> Any:
    found: dict = {}
    for item in items:
        found.setdefault(item, []).append(item.number)
    found.pop(items[0])
    return list(found.values())


def in_tuples(items: list) -> Any:
    a, b, c = items
    return len({(a, 1), (b, 1), (c, 1)}), {(a, b): 1}.get((b, a), 0)


KINDS = (Plain, Hashed, Slotted, Equal, Model)
PROGRAMS = (
    added, displays, numbered, met_before, in_order, updated, together, counted, grouped, in_tuples)  # fmt: skip


def ways(kind: type, calls: int = 12) -> Any:
    """Three objects for each call, some of which may be one; every third time those that live on."""
    draw, kept = random.Random(1), [kind(number) for number in range(3)]
    for call in range(calls):
        pool = [kind(number) for number in range(3)] if call % 3 else kept
        yield [draw.choice(pool) for _ in pool] if draw.random() < 0.4 else list(pool)


@pytest.mark.share(16)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:moebius. .* (was|were) captured")
def test_as_in_python(kind, program):
    captured, x_D = capture(lambda items, x_D: (program(items), x_D + 1), backend="eager"), torch.ones(2)
    for items in ways(kind):
        assert captured(items, x_D)[0] == program(items)
        del items


def hits(program: Any) -> int:
    captured, x_D = capture(lambda items, x_D: (program(items), x_D + 1), backend="eager"), torch.ones(2)
    for _ in range(6):
        captured([Plain(number) for number in range(3)], x_D)
    return stats(captured).hits


def test_others_are_served():
    assert hits(added) == hits(numbered) == 5


def test_pinned_they_serve_no_others(monkeypatch):
    made = Identities.made_key
    monkeypatch.setattr(Identities, "made_key", lambda self, key, is_hashed=False, **in_new: made(self, key, is_hashed))
    assert hits(added) < 5
