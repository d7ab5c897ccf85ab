"""A slot is no item, whatever the two are called: of classes that are derived from containers."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture
from moebius.heap import slots

PARENTS: dict[type, tuple] = {
    dict: ({"k": 1},), collections.OrderedDict: ({"k": 1},), collections.defaultdict: (int, {"k": 1}),
    list: ([1, 2],), collections.deque: ([1, 2],), set: ({1, 2},), object: (), Exception: (1,),
}  # fmt: skip
NAMES = ("a", "default_factory")
MADE = {parent.__name__: type("Of" + parent.__name__, (parent,), {"__slots__": ("a",)}) for parent in PARENTS}
USES: dict[str, Callable[[Any, str], Any]] = {
    "read": lambda d, name: getattr(d, name),
    "set": lambda d, name: setattr(d, name, list),
    "set and read": lambda d, name: (setattr(d, name, list), getattr(d, name)),
    "an item of that name, and read": lambda d, name: (d.__setitem__(name, 5), getattr(d, name)),
    "read, then an item of that name": lambda d, name: (getattr(d, name), d.__setitem__(name, 5), getattr(d, name)),
    "set, and an item of that name": lambda d, name: (setattr(d, name, list), d.__setitem__(name, 5), d[name]),
    "set, and another item": lambda d, name: (setattr(d, name, list), d["missing"]),
    "an item of that name, and another": lambda d, name: (d.__setitem__(name, 5), d["missing"]),
    "deleted": lambda d, name: delattr(d, name),
}


def shown(d: Any) -> tuple[Any, ...]:
    return repr(d).partition(" at 0x")[0], getattr(d, "a", None), getattr(d, "default_factory", None)


@pytest.mark.share(35)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("parent", PARENTS, ids=lambda parent: parent.__name__)
@pytest.mark.parametrize("before", [True, False], ids=["before", "in the step"])
def test_a_slot_is_no_item(before: bool, parent: type, use: str, name: str) -> None:
    def make() -> Any:
        d = MADE[parent.__name__](*PARENTS[parent])
        d.a = 9
        return d

    def step(x: torch.Tensor, given: Any) -> Any:
        d = given if before else make()
        try:
            return x + 1, USES[use](d, name), shown(d)
        except (AttributeError, TypeError, KeyError) as error:
            return x + 1, type(error).__name__, shown(d)

    captured = capture(step, backend="eager")
    for _ in range(3):
        ours, plain = make(), make()
        assert repr(captured(torch.ones(1), ours)) == repr(step(torch.ones(1), plain))
        assert shown(ours) == shown(plain)


@pytest.mark.parametrize("parent", [dict, collections.defaultdict])
def test_without_it_an_item_is_read_as_the_slot(parent: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "in_slots", lambda record: record.writes)
    with pytest.raises(AssertionError):
        test_a_slot_is_no_item(True, parent, "an item of that name, and read", "a")
