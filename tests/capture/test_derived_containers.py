"""Classes derived from containers, with methods of their own: C code calls these where plain Python's does, as often,
and what they do is done in each call.

What the class has of its own × what it is derived from × where its object comes from × what is done with it.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture

LOG: list[Any] = []
BASES: dict[Any, tuple] = {dict: (), collections.OrderedDict: (), collections.defaultdict: (int,)}
BASES |= {collections.Counter: (), collections.UserDict: (), collections.ChainMap: ()}
ITEMS = {"a": 1, "b": 2}


def all_three(base: Any) -> Any:
    class Logged(base):
        def __getitem__(self, key):
            LOG.append(key)
            return 9

        def keys(self):
            LOG.append("keys")
            return base.keys(self)

        def __iter__(self):
            LOG.append("iter")
            return base.__iter__(self)

    return Logged


def keys(base: Any) -> Any:
    class Logged(base):
        def keys(self):
            LOG.append("keys")
            return ["b"]

    return Logged


def items(base: Any) -> Any:
    class Logged(base):
        def __getitem__(self, key):
            LOG.append(key)
            return 9

    return Logged


def named(**given):
    return given


def updated(d):
    q = {"c": 0}
    q.update(d)
    return q


def joined(d):
    q = {}
    q |= d
    return q


DONE: dict[str, Callable[[Any], Any]] = {
    "f(**d)": lambda d: named(**d),
    "{**d}": lambda d: {**d},
    "dict(d)": lambda d: dict(d),
    "dict(**d)": lambda d: dict(**d),
    "update": updated,
    "{} | d": lambda d: {} | d,
    "d | {}": lambda d: dict(d | {"z": 1}),
    "z | d": lambda d: dict({"z": 1} | d),
    "|=": joined,
    "|= {}": lambda d: d.__ior__({}) is d,
    "OrderedDict(d)": lambda d: dict(collections.OrderedDict(d)),
    "defaultdict(int, d)": lambda d: dict(collections.defaultdict(int, d)),
    "Counter(d)": lambda d: dict(collections.Counter(d)),
    "ChainMap(d)": lambda d: dict(collections.ChainMap(d)),
    "==": lambda d: [d == ITEMS, d == ITEMS],
    "list": lambda d: list(d),
    "sorted": lambda d: sorted(d),
    "copy": lambda d: d.copy(),
    "in": lambda d: "a" in d,
    "values": lambda d: list(d.values()),
    "items": lambda d: list(d.items()),
    "format": lambda d: "{a}".format(**d),
    "format_map": lambda d: "{a}".format_map(d),
    "%": lambda d: "%(a)s" % d,  # noqa: UP031
    "pop": lambda d: d.pop("a", None) and d.setdefault("a", 1),
    "reversed": lambda d: list(reversed(d)),
    "zip": lambda d: list(zip(d, d.values(), strict=False)),
    "max": lambda d: max(d, key=d.get),
    "get": lambda d: d.get("a"),
    "len": lambda d: len(d),
    "returned": lambda d: d,
}


def told(function: Callable[..., Any], make: Callable[[], Any]) -> list[Any]:
    LOG.clear()
    given, found = make(), []
    for _ in range(3):
        try:
            found.append(repr(function(torch.ones(1), given)))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        found.append(list(LOG))
    return found


@pytest.mark.share(30)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
@pytest.mark.parametrize("own", [all_three, keys, items], ids=lambda own: own.__name__)
@pytest.mark.parametrize("made", ["in the step", "before"])
def test_a_mapping_is_read_by_its_own_methods(done: str, base: Any, own: Any, made: str) -> None:
    function, kind = DONE[done], own(base)

    def make() -> Any:
        return kind(*BASES[base], dict(ITEMS))

    def step(x, given):
        return x + 1, function(make() if made == "in the step" else given)

    assert told(capture(step, backend="eager"), make) == told(step, make)


@pytest.mark.parametrize("made", ["in the step", "before"])
@pytest.mark.parametrize("own", ["__len__", "__iter__", "__bool__", "__eq__", "__contains__", "__getitem__"])
def test_capture_asks_a_tuple_for_nothing(own: str, made: str) -> None:
    def method(self, *args):
        LOG.append(own)
        return getattr(tuple, own)(self, *args) if own != "__bool__" else len(LOG) % 3 == 0

    kind: Any = type("Own", (tuple,), {own: method})
    asked = {
        "passed on": lambda t: t,
        "truth": lambda t: not t,
        "items": lambda t: [*t],
        "first": lambda t: t[0],
        "length": lambda t: len(t),
        "in": lambda t: 1 in t,
        "equal": lambda t: t == (1, 2),
    }
    for (name, ask), first in itertools.product(asked.items(), (1, torch.ones(1))):
        if name in ("in", "equal") and isinstance(first, torch.Tensor):
            continue

        def step(x, given, ask=ask, first=first):
            return x + 1, ask(kind((first, 2)) if made == "in the step" else given)

        assert told(capture(step, backend="eager"), lambda first=first: kind((first, 2))) == told(
            step, lambda first=first: kind((first, 2))
        ), name


def test_what_a_truth_in_python_counts_may_vary() -> None:
    class Every:
        def __init__(self):
            self.calls = 0

        def __bool__(self):
            self.calls += 1
            return self.calls % 3 == 0

    def step(x, every):
        return x * 2 if every else x * 3

    captured, plain, ours = capture(step, backend="eager"), Every(), Every()
    for _ in range(12):
        assert captured(torch.ones(1), ours).item() == step(torch.ones(1), plain).item()
    assert plain.calls == ours.calls


@pytest.mark.parametrize("base", [collections.defaultdict, collections.OrderedDict])
def test_a_derived_dict_that_the_step_makes_comes_back_whole(base: Any) -> None:
    kind: Any = type("Derived", (base,), {})

    def step(x, f):
        return x + 1, kind(*f, ITEMS), kind(*f, ITEMS) | {}, {} | kind(*f, ITEMS)

    captured = capture(step, backend="eager")
    factory = (list,) if base is collections.defaultdict else ()
    for _ in range(2):
        for found in captured(torch.ones(1), factory)[1:]:
            assert type(found) is kind and found == ITEMS
            assert not factory or found["new"] == []


@pytest.mark.share(7)
@pytest.mark.parametrize("base", [list, dict, set, tuple, frozenset, collections.OrderedDict, collections.deque])
@pytest.mark.parametrize("method", ["__eq__", "__ne__"])
def test_an_own_comparison_that_asks_its_base(base: Any, method: str) -> None:
    def compared(self, other):
        LOG.append(method)
        return getattr(base, method)(self, other)

    kind: Any = type("Own", (base,), {method: compared, "__hash__": base.__hash__})
    others = [base, kind, list, lambda given: 1]

    def step(x, given):
        made = kind(given[0])
        return x + 1, [made == other for other in given], [made != other for other in given], given[-1] == made

    for items in ([(1, 2), (3, 4)], [(3, 4), (1, 2)], []):

        def make(items=items):
            return [make(items) for make in others]

        assert told(capture(step, backend="eager"), make) == told(step, make)


def in_place(op: str) -> Callable[[Any], Any]:
    names: dict[str, Any] = {}
    exec(f"def done(d):\n    s = {{1, 7}}\n    s {op} d\n    return s", names)
    return names["done"]


WITH_SETS: dict[str, Callable[[Any], Any]] = {
    "set": lambda d: set(d),
    "frozenset": lambda d: frozenset(d),
    "union": lambda d: {1}.union(d),
    "intersection": lambda d: {1, 7}.intersection(d),
    "difference": lambda d: {1, 7}.difference(d),
    "isdisjoint": lambda d: {7}.isdisjoint(d),
    "issubset": lambda d: {7}.issubset(d),
    "{*d}": lambda d: {*d},
    "[*d]": lambda d: [*d],
    "f(*d)": lambda d: (lambda *a: a)(*d),
    "list": lambda d: list(d),
    "tuple": lambda d: tuple(d),
    "extend": lambda d: (lambda s: (s.extend(d), s))([0]),
    "|": lambda d: {1} | d,
    "&": lambda d: {1, 7} & d,
    "<": lambda d: {1} < d,
    "==": lambda d: {1, 2} == d,
    "|=": in_place("|="),
    "&=": in_place("&="),
    "-=": in_place("-="),
    "in": lambda d: 1 in d,
    "max": lambda d: max(d),
    "zip": lambda d: list(zip(d, d, strict=True)),
    "dict.fromkeys": lambda d: dict.fromkeys(d),
}
OWN: dict[str, Any] = {"__iter__": (7, 8), "__len__": 5, "__length_hint__": 3, "__contains__": None, "__eq__": None}


@pytest.mark.share(30)
@pytest.mark.parametrize("done", WITH_SETS)
@pytest.mark.parametrize("base", [set, frozenset, list, tuple], ids=lambda base: base.__name__)
@pytest.mark.parametrize("own", ["nothing", *OWN])
@pytest.mark.parametrize("made", ["in the step", "before"])
def test_what_sets_take_of_a_derived_collection(done: str, base: Any, own: str, made: str) -> None:
    function = WITH_SETS[done]

    def method(self, *args):
        LOG.append(own)
        answer = OWN[own]
        return getattr(base, own)(self, *args) if answer is None else iter(answer) if own == "__iter__" else answer

    kind: Any = type("Derived", (base,), {} if own == "nothing" else {own: method, "__hash__": base.__hash__})

    def step(x, given):
        return x + 1, function(kind((1, 2)) if made == "in the step" else given)

    assert told(capture(step, backend="eager"), lambda: kind((1, 2))) == told(step, lambda: kind((1, 2)))


class Asking:
    """Methods that ask their base class, and no more."""

    def __getitem__(self, key):
        LOG.append(key)
        return super().__getitem__(key)  # type: ignore[misc]


class Setting:
    def __setitem__(self, key, value):
        super().__setitem__(key, (value, "own"))  # type: ignore[misc]


class Missing:
    def __missing__(self, key):
        self[key] = len(self)  # type: ignore[index, arg-type]
        return self[key]  # type: ignore[index]


BUILT: dict[str, Callable[[], Any]] = {}
for parent, given in (
    (collections.defaultdict, (int, {"a": 1})), (dict, ({"a": 1},)), (collections.OrderedDict, ({"a": 1},)),
    (list, ([1, 2],)), (tuple, ((1, 2),)), (collections.deque, ((1, 2),)),
):  # fmt: skip
    for part in (None, Asking, Setting, Missing):
        bases = (parent,) if part is None else (part, parent)
        name = f"{parent.__name__} {part.__name__ if part else 'alone'}"
        BUILT[name] = functools.partial(type(name.replace(" ", ""), bases, {}), *given)
KEYED: dict[str, Callable[[Any, Any], Any]] = {
    "d[k]": lambda d, k: d[k],
    "d[0]": lambda d, k: d[0],
    "d[:1]": lambda d, k: d[:1],
    "get": lambda d, k: d.get(k),
    "in": lambda d, k: k in d,
    "asked of the base": lambda d, k: type(d).__mro__[-2].__getitem__(d, k),
    "update": lambda d, k: d.update({k: 1}),
    "update by name": lambda d, k: d.update(z=1),
    "setdefault": lambda d, k: d.setdefault(k, 3),
    "pop": lambda d, k: d.pop(k, None),
    "written": lambda d, k: d.__setitem__(k, d[k]),
    "another factory": lambda d, k: setattr(d, "default_factory", list) or d[k],
    "the factory": lambda d, k: d.default_factory,
}


@pytest.mark.share(30)
@pytest.mark.parametrize("done", KEYED)
@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("made", ["in the step", "before"])
def test_items_of_a_derived_container(done: str, kind: str, made: str) -> None:
    ask = KEYED[done]

    def step(x, given, key):
        d = BUILT[kind]() if made == "in the step" else given
        try:
            return x + 1, ask(d, key), d
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            return x + 1, (type(error).__name__, str(error)), d

    histories = []
    for run in (step, capture(step, backend="eager")):
        LOG.clear()
        given, history = BUILT[kind](), []
        for call in range(6):
            if call == 3 and isinstance(given, collections.defaultdict):
                given.default_factory = list
            history.append((repr(run(torch.ones(1), given, f"k{call % 4}")), repr(given), list(LOG)))
        histories.append(history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("kind", [name for name in BUILT if name.startswith("defaultdict")])
def test_a_factory_that_sets_the_missing_item_itself(kind: str) -> None:
    """Which of the two stays differs between versions of Python, as does whose ``__setitem__`` is asked."""
    held: list[Any] = [None]

    def factory() -> int:
        held[0]["k"] = 7
        return 8

    def step(x: torch.Tensor, d: Any, key: str) -> Any:
        held[0] = d
        return x + 1, d[key], d[key], dict(d)

    captured = capture(step, backend="eager")
    for key in ("k", "j", "k", "j"):
        given = [BUILT[kind](), BUILT[kind]()]
        for one in given:
            one.default_factory = factory
        assert repr(captured(torch.ones(1), given[0], key)) == repr(step(torch.ones(1), given[1], key))
        assert repr(dict(given[0])) == repr(dict(given[1]))


def test_a_set_is_joined_with_sets_alone() -> None:
    def step(x, other):
        s = {1}
        s |= other
        return x + 1, s

    captured = capture(step, backend="eager")
    for other in ([2], (2,), {2: 3}, "a"):
        with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \|="):
            captured(torch.ones(1), other)
    for other in ({2}, frozenset((2,)), {2: 3}.keys()):
        assert captured(torch.ones(1), other)[1] == {1, 2}


@pytest.mark.share(9)
@pytest.mark.parametrize("base", [ValueError, KeyError, StopIteration, AttributeError, OSError])
@pytest.mark.parametrize("own", ["__new__", "__init__", "__setattr__", "__str__"])
def test_an_exception_with_a_method_of_its_own(base: Any, own: str) -> None:
    def method(*args):
        LOG.append((own, len(args)))
        return getattr(base, own)(*args)

    kind: Any = type("Own", (base,), {own: method})

    def step(x):
        made = kind("told")
        try:
            raise made
        except base as error:
            error.note = len(LOG)
            return x + 1, made.args, str(error), error

    found = []
    for run in (step, capture(step, backend="eager")):
        LOG.clear()
        calls = [run(torch.ones(1)) for _ in range(3)]
        found.append(([(args, text, error.args, error.note) for _, args, text, error in calls], list(LOG)))
    assert found[0] == found[1]
