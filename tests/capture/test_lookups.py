"""What a getter of the user's gave is known while nothing that it read has been written (``python/lookups.py``)."""

from __future__ import annotations

import contextvars
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.bytecode import counting

TABLE: dict[str, Any] = {}
CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("CURRENT", default=2)


class Slotted:
    __slots__ = ("v",)


def places() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]]:
    """What a getter reads, and how the step sets it."""
    slot, cell, items, deep, weight = Slotted(), 2, [2, 3], {"a": {"b": 2}}, torch.nn.Parameter(torch.ones(2))
    slot.v = 2
    weight.scale = 2

    def put(value: int) -> None:
        nonlocal cell
        cell = value

    def draw(obj: Any) -> int:
        return 2 + 0 * int(random.random())

    def count(obj: Any) -> int:
        TABLE["asked"] = TABLE.get("asked", 0) + 1
        return TABLE["asked"]

    def append(obj: Any, value: int) -> None:
        items.append(value)

    return {
        "its own": (lambda obj: vars(obj)["own"], lambda obj, v: setattr(obj, "own", v)),
        "its dict": (lambda obj: vars(obj)["own"], lambda obj, v: vars(obj).update(own=v)),
        "its class": (lambda obj: type(obj).shared, lambda obj, v: setattr(type(obj), "shared", v)),
        "a global": (lambda obj: TABLE["v"], lambda obj, v: TABLE.update(v=v)),
        "a cell": (lambda obj: cell, lambda obj, v: put(v)),
        "a slot": (lambda obj: slot.v, lambda obj, v: setattr(slot, "v", v)),
        "a list": (lambda obj: sum(items), append),
        "something deep": (lambda obj: deep["a"]["b"], lambda obj, v: deep["a"].update(b=v)),
        "something put there": (lambda obj: deep["a"].get("c", 1), lambda obj, v: deep.update(a={"c": v})),
        "a context variable": (lambda obj: CURRENT.get(), lambda obj, v: CURRENT.set(v) and None),
        "a tensor's attribute": (lambda obj: weight.scale, lambda obj, v: setattr(weight, "scale", v)),
        "a tensor's need": (
            lambda obj: 2 + weight.requires_grad,
            lambda obj, v: setattr(weight, "requires_grad", v == 2),
        ),
        "nothing": (lambda obj: 2, lambda obj, v: None),
        "a draw": (draw, lambda obj, v: None),
        "a count": (count, lambda obj, v: TABLE.update(asked=v)),
        "the mode": (lambda obj: 2 + torch.is_grad_enabled(), lambda obj, v: torch.set_grad_enabled(v == 2) and None),
        "a new list": (lambda obj: [2, 3], lambda obj, v: obj.value.append(v)),
        "a list that was there": (lambda obj: items, lambda obj, v: obj.value.append(v)),
    }


class ByProperty:
    shared = 2

    def __init__(self) -> None:
        self.own = 2

    @property
    def value(self) -> Any:
        return READ[0](self)


class ByGetattribute:
    shared = 2

    def __init__(self) -> None:
        self.own = 2

    def __getattribute__(self, name: str) -> Any:
        return READ[0](self) if name == "value" else super().__getattribute__(name)


READ: list[Any] = [None]
BETWEEN = ("nothing", "a write", "a write elsewhere", "a write where data decides", "a write and one back")


@pytest.mark.share(3)
@pytest.mark.parametrize("place, cls, between", [*itertools.product(places(), (ByProperty, ByGetattribute), BETWEEN)])
def test_a_getter_gives_what_it_would_give(place: str, cls: Any, between: str) -> None:
    def number(value: Any) -> Any:
        return sum(value) if type(value) is list else value

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        random.seed(0)
        TABLE.clear()
        TABLE.update(v=2)
        cls.shared = 2
        read, put = places()[place]
        READ[0], obj, other = read, cls(), cls()

        def step(x: torch.Tensor, value: int) -> torch.Tensor:
            first = number(obj.value)
            if between == "a write" or between == "a write and one back":
                put(obj, value)
            elif between == "a write elsewhere":
                other.own = TABLE["other"] = value
            elif between == "a write where data decides" and x.sum() > 0:
                put(obj, value)
            second = number(obj.value)
            if between == "a write and one back":
                put(obj, 2)
            third = number(obj.value)
            return x * first + 10 * second + 100 * third

        captured, found = wrap(step), []
        for sign, value in ((1, 5), (1, 5), (-1, 6), (1, 6)):
            found.append(captured(torch.full((2,), float(sign)), value).tolist())
            found += [random.random(), torch.is_grad_enabled(), dict(TABLE), CURRENT.get()]
            torch.set_grad_enabled(True)
            CURRENT.set(2)
        return found

    assert run(lambda step: capture(step, backend="eager")) == run(lambda step: step)


@pytest.mark.parametrize("cls", (ByProperty, ByGetattribute))
def test_a_getter_that_is_asked_again_is_not_interpreted_again(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()
    step_of = counting.Counter.step

    def counted(self: Any, code: Any, *args: Any) -> None:
        ran[code.co_name] += 1
        step_of(self, code, *args)

    monkeypatch.setattr(counting.Counter, "step", counted)
    READ[0], obj = (lambda obj: obj.own), cls()

    def step(x: torch.Tensor, often: int) -> torch.Tensor:
        for _ in range(often):
            x = x * obj.value
        return x

    found = []
    for often in (2, 8):
        ran.clear()
        captured = capture(step, backend="eager", dynamic=False)
        assert captured(torch.ones(2), often).tolist() == [2.0**often] * 2 and not stats(captured).breaks
        found.append({name: count for name, count in ran.items() if name != "step"})
    assert found[0] == found[1] and found[0]
