"""Objects as keys of dicts and sets: as their class hashes and compares them, in each call."""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass

import pytest
import torch

from moebius import capture, stats
from moebius.python import own_hashes


@dataclass(frozen=True)
class Frozen:
    number: int
    name: str = "a"


@dataclass(frozen=True)
class Nested:
    inner: Frozen
    sizes: tuple = (1, 2)

    @property
    def number(self):
        return self.inner.number


class ByNumber:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return type(other) is type(self) and self.number == other.number


class OneHash(ByNumber):
    """All are in one place of the table."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other or (type(other) is OneHash and self.number == other.number)


class OfAnother(ByNumber):
    """What another object holds."""

    def __init__(self, number):
        self.inner = ByNumber(number)

    number = property(lambda self: self.inner.number, lambda self, number: setattr(self.inner, "number", number))


class Slots:
    __slots__ = ("number",)
    __init__, __hash__, __eq__ = ByNumber.__init__, ByNumber.__hash__, ByNumber.__eq__


class Beside(ByNumber):
    """Hashes by what stands in another object."""

    by = {"offset": 0}

    def __hash__(self):
        return (self.number + self.by["offset"]) // 4

    __eq__ = ByNumber.__eq__


class Row(collections.namedtuple("Row", "number width")):
    __slots__ = ()

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self.number == other.number


class Counting(ByNumber):
    """Changes something whenever it is asked."""

    asked = 0

    def __hash__(self):
        Counting.asked += 1
        return hash(self.number)

    __eq__ = ByNumber.__eq__


class Drawing(ByNumber):
    """Draws a number whenever it is asked."""

    def __hash__(self):
        random.random()
        return hash(self.number)

    def __eq__(self, other):
        random.random()
        return type(other) is Drawing and self.number == other.number


KEYS = {
    "frozen": Frozen,
    "nested": lambda number: Nested(Frozen(number)),
    "by number": ByNumber,
    "one hash": OneHash,
    "of another": OfAnother,
    "slots": Slots,
    "in a tuple": lambda number: (Frozen(number), "a"),
    "beside": Beside,
    "row": lambda number: Row(number, 3),
    "counting": Counting,
    "drawing": Drawing,
}


def number_of(key):
    return key[0].number if type(key) is tuple else key.number


class Held:
    """What lives from call to call."""

    def __init__(self, make):
        self.make = make
        self.table = {make(number): float(number) for number in (1, 2, 3)}
        self.known = {make(1), make(2)}
        self.counts = collections.Counter()
        self.memo = {}
        self.key = make(2)
        self.layers = torch.nn.ModuleList(Layer(self, number) for number in (1, 2, 3))

    def kept(self):
        kept = (self.table, self.counts, self.memo)
        return [[(number_of(key), value) for key, value in table.items()] for table in kept] + [
            sorted(map(number_of, self.known))
        ]


TABLE = {}


class Layer(torch.nn.Module):
    def __init__(self, held, number):
        super().__init__()
        self.held, self.key = [held], held.make(number)
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x_D):
        return x_D * self.weight * self.held[0].table.get(self.key, 7.0)


def by_a_new_key(x_D, held):
    return x_D * held.table[held.make(2)]


def by_a_held_key(x_D, held):
    return x_D * held.table.get(held.key, 5.0)


def membership_of_a_global(x_D, held):
    return x_D * (held.make(2) in TABLE)


def membership(x_D, held):
    return x_D * (held.key in held.table) + (held.make(7) in held.table)


def of_a_set(x_D, held):
    return x_D * (held.key in held.known)


def memo(x_D, held):
    if held.key not in held.memo:
        held.memo[held.key] = 1.0 + len(held.memo)
    return x_D * held.memo[held.key]


def counting(x_D, held):
    held.counts[held.key] += 1
    return x_D * held.counts[held.key]


def set_and_taken(x_D, held):
    held.table.setdefault(held.make(9), 2.5)
    held.table[held.key] = held.table.pop(held.make(9)) + 1
    del held.table[held.make(1)]
    held.table[held.make(1)] = 4.0
    return x_D * held.table[held.key]


def of_its_own(x_D, held):
    made = {held.make(number): x_D * number for number in (1, 2, 1)}
    made[held.key] = x_D + 5
    return made[held.make(2)] + len(made) + made[held.make(1)]


def a_set_of_its_own(x_D, held):
    made = {held.make(1), held.key, held.make(2)}
    made.add(held.make(1))
    return x_D * len(made) + (held.key in made)


def given_back(x_D, held):
    return {held.make(1): x_D, held.key: x_D * 2}


def changed_in_the_step(x_D, held):
    before = held.table.get(held.key, 8.0)
    if isinstance(held.key, ByNumber | Slots):
        held.key.number += 1
    return x_D * before + held.table.get(held.key, 9.0)


def changed_before_it_is_asked_for(x_D, held):
    if isinstance(held.key, ByNumber | Slots):
        held.key.number = 1
    return x_D * held.table.get(held.key, 9.0)


def changed_beside_in_the_step(x_D, held):
    Beside.by["offset"] += 3
    found = held.table.get(held.make(1), 8.0)
    Beside.by["offset"] -= 3
    return x_D * found


def set_beside_in_the_step(x_D, held):
    Beside.by["offset"] = 0
    return x_D * (held.make(9) in held.table)


def in_the_memo(x_D, held):
    return x_D * (held.key in held.memo)


def changed_while_it_is_a_key(x_D, held):
    key = held.make(1)
    made = {key: x_D * 2}
    if isinstance(key, ByNumber | Slots):
        key.number = 6
    return made


def layers(x_D, held):
    for layer in held.layers:
        x_D = layer(x_D)
    return x_D


STEPS = (
    by_a_new_key, by_a_held_key, membership, membership_of_a_global, of_a_set, memo, counting, set_and_taken,
    of_its_own, a_set_of_its_own, given_back, changed_in_the_step, changed_before_it_is_asked_for,
    changed_beside_in_the_step, set_beside_in_the_step, in_the_memo, changed_while_it_is_a_key, layers,
)  # fmt: skip


def change(how, call, held):
    make = held.make
    match how:
        case "made anew":
            held.key = make(2)
        case "another":
            held.key = make(call % 3 + 1)
        case "in place" if call in (3, 5) and isinstance(held.key, ByNumber | Slots):
            held.key.number += 1
        case "in place in a layer" if call == 3 and isinstance(held.layers[1].key, ByNumber | Slots):
            held.layers[1].key.number += 1
        case "an entry":
            held.table[make(2)] = 10.0 + call
        case "an entry goes" if call in (2, 4):
            held.table.pop(make(2), None)
        case "another table" if call == 3:
            held.table = {make(number): number * 11.0 for number in (3, 2, 1)}
        case "beside" if call in (2, 4):
            Beside.by["offset"] += 1
        case "a key of the table" | "a key of the table, later" if call - (how[-1] == "r") in (0, 3):
            # (Python finds it again where it stood)
            for key in (*held.table, *TABLE):
                if isinstance(key, ByNumber | Slots):
                    key.number += 10 if call < 2 else -10
        case "an entry comes with what is beside":
            if call == 3:
                Beside.by["offset"] = 0
                held.table[make(9)] = 1.0
            Beside.by["offset"] = 1 if call < 3 else 5
        case "another, which is known" if call:
            held.key, held.memo = make(call + 2), {make(call + 2): 1.0}
        case "order" if call == 3:
            held.table = dict(reversed(held.table.items()))


CHANGES = (
    "nothing", "made anew", "another", "in place", "in place in a layer", "an entry", "an entry goes", "another table",
    "beside", "a key of the table", "a key of the table, later", "an entry comes with what is beside",
    "another, which is known", "order",
)  # fmt: skip


def outcomes(step, make, how):
    Beside.by["offset"] = Counting.asked = 0
    random.seed(0)
    held, found = Held(make), []
    TABLE.clear()
    TABLE.update(Held(make).table)
    for call in range(7):
        change(how, call, held)
        asked = Counting.asked
        try:
            result = step(torch.arange(3.0), held)
            if type(result) is dict:
                result = [(number_of(key), value.tolist(), key in result) for key, value in result.items()]
            found.append(result.tolist() if isinstance(result, torch.Tensor) else result)
        except KeyError as error:
            found.append(type(error))
        found.append([held.kept(), Counting.asked - asked, random.getstate()])
    return found


@pytest.mark.share(30)
@pytest.mark.filterwarnings("ignore::moebius.MoebiusWarning")
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key", KEYS)
def test_as_in_python(key, step, how):
    captured = capture(step, backend="eager")
    assert outcomes(captured, KEYS[key], how) == outcomes(step, KEYS[key], how)


@pytest.mark.parametrize("step", [by_a_new_key, by_a_held_key, membership, set_and_taken, of_its_own, a_set_of_its_own])
@pytest.mark.parametrize("key", ["frozen", "nested", "by number", "one hash", "slots", "in a tuple"])
def test_no_break(key, step):
    captured = capture(step, backend="eager")
    outcomes(captured, KEYS[key], "nothing")
    assert stats(captured).breaks == 0 and stats(captured).hits >= 5


@pytest.mark.parametrize(
    "key, step, how, off",
    [
        ("one hash", in_the_memo, "another, which is known", "equal"),
        ("by number", set_and_taken, "a key of the table", "lost"),
        ("beside", set_beside_in_the_step, "an entry comes with what is beside", "unchanged"),
        ("by number", changed_while_it_is_a_key, "nothing", "looked at"),
    ],
)
def test_where_nobody_asks(key, step, how, off, monkeypatch):
    if off == "equal":
        monkeypatch.setattr(own_hashes.Equal, "__call__", lambda self, found: True)
    elif off == "lost":
        monkeypatch.setattr(own_hashes, "has_lost", lambda *args: False)
    elif off == "looked at":
        monkeypatch.setattr(own_hashes.Heap, "was_written", lambda *args: False)
    else:
        monkeypatch.setattr(own_hashes, "looks_unchanged", lambda *args: True)
    captured = capture(step, backend="eager")
    assert outcomes(captured, KEYS[key], how) != outcomes(step, KEYS[key], how)
