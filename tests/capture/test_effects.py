"""What a captured call changes is what plain Python changes: same objects, same contents, same order."""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from moebius import capture, stats

COUNTER = {"calls": 0}
CURRENT = contextvars.ContextVar("current", default=0)
total = 0


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Output:
    loss: torch.Tensor
    parts: list = field(default_factory=list)
    where: tuple = ()

    def __post_init__(self):
        self.parts.append(self.loss * 2)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Holder:
    def __init__(self):
        self.items: list[object]
        self.items, self.table, self.seen, self.recent = [1], {"a": 1}, {1}, collections.deque([1], maxlen=3)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.groups = collections.defaultdict(list)
        self.count = 0

    @property
    def size(self):
        return len(self.items)

    @size.setter
    def size(self, value):
        self.items[:] = self.items[:value]


def set_attributes(h, x):
    h.count += 5
    h.last = x.sum()
    h.new = h.last
    del h.new
    return h.count


def lists(h, x):
    h.items.append(x)
    h.items.extend([2, 3])
    h.items[0] = "zero"
    h.items.insert(1, h.items.pop())
    del h.items[-1]
    h.items += [7]
    h.items.sort(key=lambda v: isinstance(v, torch.Tensor))
    h.items.reverse()
    return len(h.items)


def appends_only(h, x):
    h.items.append(x * 2)
    h.items.extend((1, 2))


def dicts(h, x):
    h.table["b"] = x
    h.table["a"] += 1
    h.table.setdefault("c", []).append(x + 1)
    h.table.update(d=4)
    h.table.pop("d")
    h.ordered.move_to_end("a")
    h.ordered["z"] = x
    h.groups["k"].append(x)
    return list(h.table), "b" in h.table, h.table.get("nothing", 9)


def clears(h, x):
    h.table.clear()
    h.table["only"] = 1
    h.items.clear()
    return x + len(h.table)


def sets(h, x):
    h.seen.add(2)
    h.seen |= {5, 6}
    h.seen.discard(1)
    h.recent.append(3)
    h.recent.extend([4, 5, 6])
    return sorted(h.seen), len(h.recent)


def property_setter(h, x):
    h.items.extend([4, 5, 6])
    h.size = 2
    return h.size


def global_state(h, x):
    global total
    total += 1
    COUNTER["calls"] += 1
    return x + total


def new_objects(h, x):
    out = Output(x.sum(), where=(1, x))
    slotted = Slotted(x)
    pair = Pair(out, slotted)
    shared = [x]
    h.out = out
    return {"out": out, "pair": pair, "shared": (shared, shared), "empty": ((), [], {}), "slice": slice(1, 2)}


def cycle(h, x):
    node = {"value": x}
    node["self"] = node
    h.node = node
    return node


def closures(h, x):
    scale = 2

    def inner(y):
        nonlocal scale
        scale += 1
        return y * scale

    first = inner(x)
    return first, inner, [inner(x) for _ in range(2)]


def in_place(h, x):
    x.add_(1)
    view = x[0]
    view.mul_(3)
    x[1] = 7
    x += 1
    return x.sum(), view


def random_numbers(h, x):
    return torch.rand(3) + torch.nn.functional.dropout(x, 0.5).sum() + torch.randn_like(x).sum()


def context_variable(h, x):
    token = CURRENT.set(3)
    inside = CURRENT.get()
    CURRENT.reset(token)
    return x * inside


def context_variable_kept(h, x):
    CURRENT.set(CURRENT.get() + 1)
    return x


CASES = [
    set_attributes,
    lists,
    appends_only,
    dicts,
    clears,
    sets,
    property_setter,
    global_state,
    new_objects,
    cycle,
    closures,
    in_place,
    random_numbers,
    context_variable,
    context_variable_kept,
]


def picture(value, seen=None):
    """A comparable picture of a value: contents, types and which parts are the same object."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist(), value.requires_grad)
    if isinstance(value, int | float | str | bool | bytes | type(None) | slice | type):
        return repr(value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return (
            type(value).__name__,
            [(picture(k, seen), picture(v, seen)) for k, v in value.items()],
            picture(getattr(value, "__dict__", None), seen),
        )
    if isinstance(value, set):
        return ("set", sorted(map(repr, value)))
    if isinstance(value, list | tuple | collections.deque):
        return (type(value).__name__, [picture(v, seen) for v in value])
    if callable(value) and hasattr(value, "__closure__"):
        return ("function", value.__name__, picture(value(torch.ones(1)), seen))
    slots = [(s, picture(getattr(value, s), seen)) for s in getattr(type(value), "__slots__", ()) if hasattr(value, s)]
    return (type(value).__name__, slots, picture(vars(value) if hasattr(value, "__dict__") else None, seen))


def world(function, calls):
    """Everything observable after some calls: results, the holder, globals, the random state."""
    global total
    total, COUNTER["calls"] = 0, 0
    torch.manual_seed(0)

    def inside():
        holder, results = Holder(), []
        for i in range(calls):
            x = torch.arange(6.0).reshape(2, 3) + i
            results.append(picture((function(holder, x), x)))
        return picture((results, holder)), total, dict(COUNTER), CURRENT.get(), torch.get_rng_state().tolist()

    return contextvars.Context().run(inside)


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_effects_are_those_of_plain_python(function):
    captured = capture(function)
    assert world(captured, 4) == world(function, 4)
    counts = stats(captured)
    assert counts.breaks == 0, "a graph break would make this test one of plain Python"


def test_a_growing_list_is_not_a_recompile():
    def step(h, x):
        h.items.append(x)
        return x

    captured, holder = capture(step), Holder()
    for _ in range(6):
        captured(holder, torch.ones(1))
    assert len(holder.items) == 7
    assert stats(captured).entries == 1


def test_a_counter_is_captured_at_most_three_times():
    captured, holder = capture(set_attributes), Holder()
    for i in range(8):
        assert captured(holder, torch.ones(2)) == 5 * (i + 1)
    assert stats(captured).entries <= 3


def test_iteration_keeps_identity_of_objects():
    def f(h, x):
        return h.items, [v for v in h.items], h

    captured, holder = capture(f), Holder()
    holder.items.append(object())
    for _ in range(2):
        items, copies, same = captured(holder, torch.ones(1))
        assert items is holder.items and same is holder
        assert copies[1] is holder.items[1] and copies is not items


def test_an_exception_leaves_the_effects_before_it():
    def f(h, x):
        h.count += 1
        h.items.append("before")
        if x.shape[0] == 2:
            raise ValueError("two")
        h.items.append("after")
        return x

    captured = capture(f)
    for _ in range(3):
        holder, plain = Holder(), Holder()
        for function, h in ((captured, holder), (f, plain)):
            with pytest.raises(ValueError, match="two"):
                function(h, torch.ones(2))
            function(h, torch.ones(3))
        assert picture(holder) == picture(plain)


def test_a_failing_operator_is_the_users_exception():
    def f(a, b):
        try:
            return a @ b
        except RuntimeError:
            return a.sum()

    captured = capture(f)
    for _ in range(2):
        assert captured(torch.ones(2, 3), torch.ones(2, 3)).item() == 6
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(lambda a, b: a @ b)(torch.ones(2, 3), torch.ones(2, 3))


# ----------------------------------------------------------------------------------------------------------------------
# Copies
# ----------------------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self):
        self.width, self.names = 3, ["a"]


class OwnCopy(Plain):
    def __copy__(self):
        made = OwnCopy()
        made.width = 7
        return made


class Reduced(Plain):
    def __reduce__(self):
        return Reduced, ()


@pytest.mark.parametrize("make", [Plain, OwnCopy, Reduced, lambda: [1, 2], lambda: {"a": 1}, lambda: (1, [2])])
def test_a_copy_is_copied_as_copy_does(make):
    def step(x, obj):
        made = copy.copy(obj)
        if isinstance(made, Plain):
            made.width += 1
            made.names.append("b")
            return x * made.width, made.__dict__, obj.__dict__, made is obj, type(made)
        return x + 1, made, made is obj

    captured = capture(step, backend="eager")
    for _ in range(2):
        ours, theirs = captured(torch.ones(2), make()), step(torch.ones(2), make())
        assert torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]


def test_a_class_that_gets_a_copy_method_is_noticed():
    class Config:
        def __init__(self):
            self.width = 2.0

    def step(x, config):
        return x * copy.copy(config).width

    captured = capture(step, backend="eager")
    assert torch.equal(captured(torch.ones(2), Config()), torch.full((2,), 2.0))

    def doubled(self):
        made = Config()
        made.width = self.width * 2
        return made

    Config.__copy__ = doubled
    assert torch.equal(captured(torch.ones(2), Config()), torch.full((2,), 4.0))


def test_a_default_made_by_the_steps_own_function():
    def step(x):
        table = collections.defaultdict(lambda: [x + 1])
        table["a"].append(x)
        return table["a"][0] + table["a"][1] + table["b"][0], sorted(table)

    ours, theirs = capture(step, backend="eager")(torch.ones(2)), step(torch.ones(2))
    assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]


class Flagged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.table = True, {"mode": "a"}

    def forward(self, x):
        self.seen = True
        self.table["mode"] = "b"
        self.table["mode"] = "a"
        return x * 2


def test_a_write_of_what_is_there_already_still_happens_when_it_is_not():
    module = Flagged()
    captured = capture(module)
    for _ in range(2):
        captured(torch.ones(2))
    module.seen, module.table["mode"] = False, "c"
    captured(torch.ones(2))
    assert module.seen is True and module.table == {"mode": "a"}
    del module.seen, module.table["mode"]
    captured(torch.ones(2))
    assert module.seen is True and module.table == {"mode": "a"}


def test_a_view_that_native_code_made_is_not_taken_for_constant():
    class Loud(dict):
        def __getitem__(self, key):
            return dict.__getitem__(self, key) + 100

    def total(table, x):
        for value in table.values():
            x = x + value
        return x

    captured, table = capture(total), Loud(a=1.0)
    for n in range(4):
        table["b"] = float(n)
        assert captured(table, torch.zeros(1)).item() == 1.0 + n


# ----------------------------------------------------------------------------------------------------------------------
# functools.lru_cache
# ----------------------------------------------------------------------------------------------------------------------

FACTOR = {"now": 2.0}
ASKED: list = []


@functools.lru_cache
def factor(power):
    ASKED.append(power)
    return FACTOR["now"] ** power


@functools.cache
def table(size):
    return {"size": size}


def test_a_cached_function_is_asked_once_and_keeps_its_answer(monkeypatch):
    def step(x):
        return x * factor(3)

    factor.cache_clear()
    ASKED.clear()
    captured, x = capture(step, backend="eager"), torch.ones(2)
    assert torch.equal(captured(x), x * 8) and ASKED == [3]
    monkeypatch.setitem(FACTOR, "now", 3.0)
    assert torch.equal(captured(x), x * 8) and ASKED == [3]  # as in plain Python, until the cache is cleared
    factor.cache_clear()
    assert torch.equal(captured(x), x * 27) and ASKED == [3, 3]
    assert torch.equal(captured(x), x * 27) and ASKED == [3, 3]
    assert stats(captured).breaks == 0


def test_a_cached_function_that_looks_at_what_the_step_changed(monkeypatch):
    def step(x, value):
        FACTOR["now"] = value
        return x * factor(2)

    captured, x = capture(step, backend="eager"), torch.ones(2)
    monkeypatch.setitem(FACTOR, "now", 2.0)
    for value in (5.0, 7.0):
        factor.cache_clear()
        assert torch.equal(captured(x, value), x * value**2)
    assert torch.equal(captured(x, 9.0), x * 49)


def test_a_cached_object_is_the_same_object():
    def step(x):
        made = table(2)
        made["size"] += 1
        return x * made["size"]

    table.cache_clear()
    captured, x = capture(step, backend="eager"), torch.ones(2)
    assert [captured(x)[0].item() for _ in range(3)] == [3.0, 4.0, 5.0] and table(2) == {"size": 5}


class MetaAnswers(type):
    def __getattr__(cls, name):
        raise AttributeError("of the class")


class Answers(metaclass=MetaAnswers):
    def __getattr__(self, name):
        raise AttributeError("of the object")

    @property
    def fails(self):
        raise AttributeError("of the property")


def test_attribute_errors_are_told_the_name():
    def step(x, log):
        for owner in (Answers, Answers(), x):
            try:
                _ = owner.missing
            except AttributeError as error:
                log.append((str(error), error.name))
        try:
            _ = Answers().fails
        except AttributeError as error:
            log.append((str(error), error.name))
        return x + 1

    plain, found = [], []
    step(torch.ones(2), plain)
    capture(step)(torch.ones(2), found)
    assert found == plain and {name for _, name in plain} == {"missing", "fails"}


ASKED_FOR: list[str] = []


class AsksItself:
    __slots__ = ("__hidden", "empty", "slot")

    def __init__(self, value):
        self.slot = self.__hidden = value

    def __getattr__(self, name):
        ASKED_FOR.append(name)
        raise AttributeError(name)

    def hidden(self):
        return self.__hidden


def test_slots_are_kept_without_asking_the_users_code():
    captured = capture(lambda x: AsksItself(x + 1))
    for _ in range(2):
        made = captured(torch.ones(2))
        assert made.slot is made.hidden() and torch.equal(made.slot, torch.full((2,), 2.0)) and ASKED_FOR == []
    assert stats(captured).breaks == 0


def test_a_tensor_compared_with_an_object_that_answers_for_every_attribute():
    class Every:
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    asked: list[str] = []
    for step in (lambda x, o: x == o, lambda x, o: o != x, lambda x, o: o not in [x, 2]):
        want = step(torch.ones(()), Every()), asked.copy()
        asked.clear()
        assert (capture(step)(torch.ones(()), Every()), asked) == want and asked
        asked.clear()
