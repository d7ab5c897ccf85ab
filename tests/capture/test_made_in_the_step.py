"""State that the step has made itself, read and changed around a call that backward runs once more: kinds × questions.

tests/capture/state has the kinds that existed before the call.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moebius import capture


class Plain:
    pass


class Other:
    k = 9


class Slotted:
    __slots__ = ("k",)


class Descriptor:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, obj: Any, cls: Any) -> Any:
        return obj.__dict__.get(self.name, 0)

    def __set__(self, obj: Any, value: Any) -> None:
        obj.__dict__[self.name] = value


class Described:
    k = Descriptor()


class Filling(dict):
    def __missing__(self, key: Any) -> int:
        self[key] = 0
        return 0


def filled(obj: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(obj, name, value)
    return obj


def counting():
    i = 0
    while True:
        i += 1
        yield i


def answering():
    x = 0
    while True:
        y = yield x
        x = y if y else x + 1


def begun():
    made = answering()
    next(made)
    return made


def two_functions():
    n = 0

    def bump() -> None:
        nonlocal n
        n += 1

    return bump, lambda: n


def a_class():
    class Made:
        k = 0

    return Made


def with_keys():
    held = {0: 0}
    return held, held.keys()


def bumps(obj: Any) -> None:
    obj.k = getattr(obj, "k", 0) + 1


def look(obj: Any) -> Any:
    return getattr(obj, "k", 0)


def bumps_entry(held: dict) -> None:
    held["k"] = held.get("k", 0) + 1


def entry(held: dict) -> Any:
    return held.get("k", 0)


def numbers() -> list[int]:
    return [1, 2, 3, 4, 5, 6, 7, 8, 9]


Kind = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "object": Plain, "slot": Slotted, "descriptor": Described, "namespace": types.SimpleNamespace, "class": a_class,
    "function": lambda: lambda: 0, "module": lambda: torch.nn.Linear(1, 1), "tensor's attribute": lambda: torch.ones(1),
    "exception": lambda: ValueError(1),
}  # fmt: skip
DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter, "filling": Filling,
    "default": lambda: collections.defaultdict(int),
}  # fmt: skip
OWNED: dict[str, tuple[Callable[[], Any], Callable[[Any], dict]]] = {
    "object's dict": (Plain, lambda o: o.__dict__),
    "function's dict": (lambda: lambda: 0, lambda o: o.__dict__),
    "partial's keywords": (lambda: functools.partial(dict), lambda o: o.keywords),
    "method's owner": (lambda: {}.get, lambda o: o.__self__),
    "in a slice": (lambda: slice(0, {}), lambda o: o.stop),
    "in an exception": (lambda: ValueError({}), lambda o: o.args[0]),
    "in a tuple": (lambda: ({},), lambda o: o[0]),
    "in an object": (lambda: filled(Plain(), held={}), lambda o: o.held),
}
ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": counting, "generator expression": lambda: (a for a in numbers()), "list's": lambda: iter(numbers()),
    "reversed": lambda: reversed(numbers()), "count": itertools.count, "cycle": lambda: itertools.cycle(numbers()),
    "chain": lambda: itertools.chain(numbers(), numbers()), "map": lambda: map(abs, numbers()),
}  # fmt: skip


def function() -> Callable:
    def one(k: int = 1) -> int:
        return k

    return one


def function_of_a_keyword() -> Callable:
    def one(*, k: int = 1) -> int:
        return k

    return one


def reads_itself() -> Callable:
    def one() -> int:
        return one.k  # type: ignore[attr-defined]

    return filled(one, k=1)


def proxied() -> tuple[Callable, Callable]:
    """What changes a dict, and what reads it through a proxy alone."""
    held = {"k": 1}
    proxy = types.MappingProxyType(held)
    return (lambda: bumps_entry(held)), (lambda: proxy["k"])


class OfList(list):
    k: int


KINDS: dict[str, Kind] = {
    **{name: (make, bumps, look) for name, make in ATTRIBUTES.items()},
    **{name: (make, bumps_entry, entry) for name, make in DICTS.items()},
    **{
        name: (make, lambda o, of=of: bumps_entry(of(o)), lambda o, of=of: entry(of(o)))
        for name, (make, of) in OWNED.items()
    },
    **{f"iterator: {name}": (make, next, next) for name, make in ITERATORS.items()},
    "list": (list, lambda o: o.append(1), len),
    "deque": (collections.deque, lambda o: o.append(1), len),
    "set": (set, lambda o: o.add(len(o)), len),
    "bytearray": (bytearray, lambda o: o.append(1), len),
    "array": (lambda: array.array("i"), lambda o: o.append(1), len),
    "text buffer": (io.StringIO, lambda o: o.write("a"), lambda o: len(o.getvalue())),
    "random numbers": (lambda: random.Random(3), lambda o: o.random(), lambda o: o.random()),
    "cell": (two_functions, lambda o: o[0](), lambda o: o[1]()),
    "generator that is sent to": (begun, lambda o: o.send(7), lambda o: o.send(None)),
    "view of a dict": (with_keys, lambda o: o[0].__setitem__(len(o[0]), 1), lambda o: len(o[1])),
    "swapped class": (Plain, lambda o: filled(o, __class__=Other), look),
    "swapped dict": (Plain, lambda o: filled(o, __dict__={"k": look(o) + 1}), look),
    "function's defaults": (function, lambda o: filled(o, __defaults__=(o() + 1,)), lambda o: o()),
    "function's keyword defaults": (
        function_of_a_keyword,
        lambda o: filled(o, __kwdefaults__={"k": o() + 1}),
        lambda o: o(),
    ),
    "function's keyword defaults in place": (
        function_of_a_keyword,
        lambda o: o.__kwdefaults__.__setitem__("k", o() + 1),
        lambda o: o(),
    ),
    "function's code": (function, lambda o: filled(o, __code__=(lambda k=1: 7).__code__), lambda o: o()),
    "function in an object": (
        lambda: filled(Plain(), f=function()),
        lambda o: filled(o.f, __defaults__=(o.f() + 1,)),
        lambda o: o.f(),
    ),
    "partial of a function": (
        lambda: functools.partial(function()),
        lambda o: filled(o.func, __defaults__=(o() + 1,)),
        lambda o: o(),
    ),
    "mapping proxy": (proxied, lambda o: o[0](), lambda o: o[1]()),
    "default factory": (
        lambda: collections.defaultdict(lambda: 1),
        lambda o: filled(o, default_factory=lambda: 7),
        lambda o: o.default_factory(),
    ),
    "user's dict": (
        lambda: collections.UserDict(k=1),
        lambda o: o.__setitem__("k", o["k"] + 1),
        lambda o: o["k"],
    ),
    "attribute that a function reads of itself": (
        reads_itself,
        lambda o: filled(o, k=o.k + 1),
        lambda o: o(),
    ),
    "list in a slot": (lambda: filled(Slotted(), k=[]), lambda o: o.k.append(1), lambda o: len(o.k)),
    "attribute of a list": (lambda: filled(OfList(), k=1), bumps, look),
    "arguments of an exception": (lambda: ValueError(1), lambda o: filled(o, args=(*o.args, 1)), lambda o: len(o.args)),
}


def recomputed(call: Callable, *args: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False)


def changed_after_the_call(make: Callable, change: Callable, read: Callable, w: torch.Tensor) -> Any:
    y = recomputed(lambda w, o: (w * (read(o) + 1)).sin(), w, o := make())
    change(o)
    y.sum().backward()
    return w.grad


def changed_after_a_call_that_closes_over_it(make: Callable, change: Callable, read: Callable, w: torch.Tensor) -> Any:
    o = make()
    y = recomputed(lambda w: (w * (read(o) + 1)).sin(), w)
    change(o)
    y.sum().backward()
    return w.grad


def changed_in_the_call(make: Callable, change: Callable, read: Callable, w: torch.Tensor) -> Any:
    o = make()

    def call(w: torch.Tensor) -> Any:
        change(o)
        return (w * (read(o) + 1)).sin()

    recomputed(call, w).sum().backward()
    return w.grad, read(o)


def made_in_a_call_and_changed_in_the_next(make: Callable, change: Callable, read: Callable, w: torch.Tensor) -> Any:
    def second(w: torch.Tensor, o: Any) -> Any:
        change(o)
        return (w * (read(o) + 1)).sin()

    y, o = recomputed(lambda w: (w * 2, make()), w)
    recomputed(second, y, o).sum().backward()
    return w.grad, read(o)


def read_in_a_functions_backward(make: Callable, change: Callable, read: Callable, w: torch.Tensor) -> Any:
    o = make()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x * read(o)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return grad * read(o)

    y = Scaled.apply(w)
    change(o)
    y.sum().backward()
    return w.grad, read(o)


QUESTIONS = [
    changed_after_the_call, changed_after_a_call_that_closes_over_it, changed_in_the_call,
    made_in_a_call_and_changed_in_the_next, read_in_a_functions_backward,
]  # fmt: skip


@pytest.mark.share(16)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_plain_python(kind: str, question: Callable) -> None:
    step = functools.partial(question, *KINDS[kind])

    def run(function: Callable) -> str:
        return repr(function(torch.ones(2, requires_grad=True)))

    def called(w: torch.Tensor) -> Any:
        return step(w)

    captured = capture(called)
    assert [run(captured), run(captured)] == [run(step), run(step)]


SILENT_BEFORE = [
    "function's defaults", "mapping proxy", "partial of a function", "default factory", "user's dict",
    "attribute that a function reads of itself", "iterator: generator",
    "partial's keywords", "function's dict", "view of a dict", "swapped class",
]  # fmt: skip


@pytest.mark.parametrize("kind", SILENT_BEFORE)
def test_those_that_were_not_noticed(kind: str) -> None:
    test_as_in_plain_python(kind, changed_after_the_call)
