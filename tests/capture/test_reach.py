"""What a function could look at: each way to a thing that the step may have changed, and code that has none."""

from __future__ import annotations

import collections
import contextvars
import functools
import importlib.util
import logging
import types
from collections.abc import Callable

import pytest
import torch

from moebius import capture, stats
from moebius.python.reach import may_look_at

STATE = contextvars.ContextVar("state", default=0)
OTHER = contextvars.ContextVar("other", default=0)
LOG = logging.getLogger(__name__)
MODULE = types.ModuleType("settings")
MODULE.state = STATE  # type: ignore[attr-defined]
ANSWERING = types.ModuleType("answering")
ANSWERING.__getattr__ = lambda name: STATE.get()  # type: ignore[attr-defined]


@functools.singledispatch
def dispatched(number: int) -> int:
    return number


dispatched.register(str, lambda text: STATE.get())


class Holder:
    held = STATE

    def __init__(self) -> None:
        self.own = STATE

    def ask(self) -> int:
        return STATE.get()

    def __call__(self) -> int:
        return STATE.get()


class Slotted:
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = STATE


HOLDER, SLOTTED, TABLE = Holder(), Slotted(), {"deep": [(STATE,)]}
PARTIAL = functools.partial(lambda state: state.get(), STATE)


def helper() -> int:
    return STATE.get()


def through_closure() -> Callable[[], int]:
    state = STATE
    return lambda: state.get()


@functools.lru_cache
def kept() -> int:
    return helper()


REACHES: dict[str, Callable] = {
    "global": lambda: STATE.get(),
    "function": lambda: helper(),
    "closure": through_closure(),
    "default": lambda state=STATE: state.get(),
    "keyword default": lambda *, state=STATE: state.get(),
    "inner function": lambda: (lambda: STATE.get())(),
    "attribute of a module": lambda: MODULE.state.get(),
    "module that answers itself": lambda: ANSWERING.anything,
    "function chosen by a class": lambda: dispatched(""),
    "attribute": lambda: HOLDER.own.get(),
    "attribute of a class": lambda: Holder.held.get(),
    "slot": lambda: SLOTTED.own.get(),
    "method": lambda: HOLDER.ask(),
    "call of an object": lambda: HOLDER(),
    "made object": lambda: Holder().ask(),
    "container": lambda: TABLE["deep"][0][0].get(),
    "partial": lambda: PARTIAL(),
    "another cached function": lambda: kept(),
}


def asks_the_system() -> bool:
    LOG.debug("asked")
    return importlib.util.find_spec("json") is not None and bool(OTHER.get() or True)


@pytest.mark.parametrize("way", REACHES)
def test_each_way_is_seen(way: str) -> None:
    assert may_look_at(REACHES[way], [STATE])


def test_what_has_no_way_is_not() -> None:
    assert not may_look_at(asks_the_system, [STATE])
    assert not may_look_at(asks_the_system, [])


def test_an_objects_attributes_are_its_own() -> None:
    """A write to an object is one to its ``__dict__``."""
    assert may_look_at(lambda: HOLDER.ask, [HOLDER.__dict__])
    assert not may_look_at(asks_the_system, [HOLDER.__dict__])


@pytest.mark.parametrize("looks", [False, True])
def test_a_cached_function_after_the_step_has_changed_something(looks: bool) -> None:
    """It is asked before the graph runs where it cannot see the change; else the graph breaks before it."""

    def asked() -> int:
        return len(importlib.util.find_spec("json").name) + (STATE.get() if looks else OTHER.get())  # type: ignore

    def step(x: torch.Tensor, ask: Callable[[], int]) -> torch.Tensor:
        STATE.set(5)
        return x * ask()

    for function, breaks in ((step, None), (capture(step, backend="eager"), looks)):
        STATE.set(0)
        result = function(torch.ones(2), functools.lru_cache(asked))
        assert result.tolist() == [9.0 if looks else 4.0] * 2
        assert breaks is None or bool(stats(function).breaks) == breaks


class Table(collections.UserDict):
    """Its items are in an attribute named data, and it has no hash."""


class Unequal:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.data = 0

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")


@functools.lru_cache
def doubled(number: int) -> int:
    return number * 2


@pytest.mark.parametrize("kind", [Table, Unequal])
@pytest.mark.parametrize("made_before", [False, True])
def test_objects_that_the_step_writes_to_are_told_apart_by_identity(kind: type, made_before: bool) -> None:
    given = kind()

    @capture(fullgraph=True)
    def step(x: torch.Tensor, given: object) -> torch.Tensor:
        table = given if made_before else kind()
        table.data = {"a": 2}  # type: ignore[attr-defined]
        return x * doubled(3) * table.data["a"]  # type: ignore[attr-defined]

    for _ in range(2):
        assert step(torch.ones(2), given).tolist() == [12.0, 12.0]
    assert stats(step).graphs == 1
