"""Objects whose class, or class's class, notes whatever it is asked: a captured call asks nothing that plain Python
does not, however often other objects take their place."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moebius import capture, stats

LOG: list[tuple[str, str]] = []
ASKED = ("__hash__", "__eq__", "__bool__", "__len__", "__repr__", "__iter__", "__call__", "__del__", "__get__")


def noted(name: str) -> Callable[..., object]:
    results = {"__hash__": 7, "__eq__": False, "__bool__": True, "__len__": 3, "__repr__": "", "__iter__": iter("")}

    def method(self: object, *args: object) -> object:
        LOG.append(("asked", name))
        return results.get(name)

    return method


def attribute(self: object, name: str) -> object:
    LOG.append(("attribute", name))
    raise AttributeError(name)


def instance_of_a_class(n: int) -> object:
    body = {name: noted(name) for name in ASKED if name not in ("__hash__", "__eq__", "__del__", "__get__")}
    return type("Noted", (), {"n": n, "__getattr__": attribute, **body})()


def hashed_its_way(n: int) -> object:
    body = {name: noted(name) for name in ("__hash__", "__eq__")}
    return type("Hashed", (), {"n": n, "__getattr__": attribute, **body})()


def dies_loudly(n: int) -> object:
    return type("Dies", (), {"n": n, "__getattr__": attribute, "__del__": lambda self: LOG.append(("died", str(n)))})()


def class_with_a_metaclass(n: int) -> object:
    body = {name: noted(name) for name in ASKED if name not in ("__call__", "__del__", "__get__")}
    meta = type("Meta", (type,), {"__getattr__": attribute, **body})
    return meta("Made", (), {"n": n})


def module(n: int) -> object:
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = n

        def __getattr__(self, name: str) -> object:
            LOG.append(("attribute", name))
            return super().__getattr__(name)

    return Loud()


def tensor(n: int) -> object:
    class Noted(torch.Tensor):
        def __getattr__(self, name: str) -> object:
            LOG.append(("attribute", name))
            raise AttributeError(name)

    made = torch.ones(1).as_subclass(Noted)
    made.n = n
    return made


def namespace(n: int) -> object:
    return type("Space", (types.SimpleNamespace,), {"__getattr__": attribute, "__eq__": noted("__eq__")})(n=n)


KINDS = {
    kind.__name__: kind
    for kind in (
        instance_of_a_class, hashed_its_way, dies_loudly, class_with_a_metaclass, module, tensor, namespace,
    )
}  # fmt: skip


class Box:
    held: object = None


def of_a_global() -> tuple:
    def step(x, given):
        return x * KEPT.n

    return step, lambda value: globals().__setitem__("KEPT", value), None


def of_a_closure() -> tuple:
    cell = None

    def step(x, given):
        return x * cell.n

    def put(value):
        nonlocal cell
        cell = value

    return step, put, None


def of_an_argument() -> tuple:
    return lambda x, given: x * given.n, lambda value: None, lambda value: value


def of_a_list() -> tuple:
    kept = [None]
    return lambda x, given: x * kept[0].n, lambda value: kept.__setitem__(0, value), None


def of_a_dict() -> tuple:
    kept = {"a": None}
    return lambda x, given: x * kept["a"].n, lambda value: kept.__setitem__("a", value), None


def of_an_attribute() -> tuple:
    box = Box()
    return lambda x, given: x * box.held.n, lambda value: setattr(box, "held", value), None


def of_a_class() -> tuple:
    return lambda x, given: x * Box.held.n, lambda value: setattr(Box, "held", value), None


def of_a_tuple() -> tuple:
    return lambda x, given: x * given[1].n, lambda value: None, lambda value: (1, value)


def of_a_default() -> tuple:
    def step(x, given, held=None):
        return x * held.n

    return step, lambda value: setattr(step, "__defaults__", (value,)), None


PLACES = {
    place.__name__: place
    for place in (
        of_a_global, of_a_closure, of_an_argument, of_a_list, of_a_dict, of_an_attribute, of_a_class, of_a_tuple,
        of_a_default,
    )
}  # fmt: skip
KEPT: object = None
ORDERS = {"each once": "012345", "one and another": "010101", "one stays": "000111", "back after a while": "00122200"}


def run(place: str, kind: str, order: str, way: Callable) -> tuple[list[float], list[tuple[str, str]], int]:
    """The results, what was asked, and how many calls were captured or hit."""
    plain, put, given = PLACES[place]()
    step = way(plain)
    made: dict[str, object] = {}
    results = []
    LOG.clear()
    for name in ORDERS[order]:
        if order == "each once" or name not in made:
            made[name] = KINDS[kind](int(name) + 2)
        put(made[name])
        results.append(step(torch.ones(2), given and given(made[name])).sum().item())
    put(None)
    captured = 0 if step is plain else stats(step).hits + stats(step).misses
    del step, plain  # (a capture holds what a class attribute or a default was, until another call sees another one)
    made.clear()
    gc.collect()
    return results, [*LOG], captured


@pytest.mark.share(60)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_asked(place: str, kind: str, order: str) -> None:
    expected, asked, _ = run(place, kind, order, lambda step: step)
    results, also, captured = run(place, kind, order, lambda step: capture(step, backend="eager"))
    assert results == expected and captured >= len(results)
    assert sorted(also) == sorted(asked) if kind == "dies_loudly" else also == asked


def test_all_of_it_stands_here() -> None:
    assert len([*itertools.product(PLACES, KINDS, ORDERS)]) == 252
