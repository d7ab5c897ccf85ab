"""What another object has taken the place of: ``model.head = nn.Linear(…)``, a helper that was made anew, a default.

What was captured for the old one keeps it alive, and all that it holds on to: guards hold what they compare. The next
call lets it go, unless the step takes such objects in turns: one that comes back is kept from then on, with the others
at its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..guards.program import changed_key, look_up
from ..guards.recorder import Fact, can_be_held_weakly
from ..hook import ABSENT
from ..values.values import ATOMS
from ..values.weak_ids import WeakIds
from .generalize_guards import met, record_name

MAX_FEW = 16
Change = tuple[str, Any, Any]  # a place, what it held, what it holds: ABSENT for nothing


class StaleCapture:
    """Of one captured callable. gone: objects whose captures went. in_iterations: names of places where one came
    back. few: captures that went after few calls."""

    def __init__(self) -> None:
        self.few = 0
        self.gone = WeakIds()
        self.in_iterations: set[str] = set()

    def goes(self, fact: Fact, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether what was captured goes, whose guard this is that does not hold."""
        return any([self.is_replaced(*change) for change in changes(fact, args, kwargs)])

    def may_go(self, served: bool) -> bool:
        """Whether a capture goes as another object stands in the place of its one: a few times, where each served few
        calls; a helper that is made anew in each epoch is another matter."""
        self.few += not served
        return self.few <= MAX_FEW

    def is_replaced(self, place: str, then: Any, now: Any) -> bool:
        """Whether one object took another one's place, and not for the while."""
        if then is now:
            return False
        if issubclass(type(then), tuple):
            items = tuple.__iter__(now) if issubclass(type(now), tuple) else iter(())
            return any([self.is_replaced(f"{place}[{i}]", item, next(items, ABSENT)) for i, item in enumerate(then)])
        if can_be_held_weakly(now) and now in self.gone:
            self.in_iterations.add(place)
        if place in self.in_iterations or type(then) in ATOMS or not can_be_held_weakly(then):
            return False
        self.gone[then] = None
        return True


def unwrapped(found: Any) -> Any:
    """What stands in a class for a function."""
    return found.__func__ if type(found) in (staticmethod, classmethod) else found


# ----------------------------------------------------------------------------------------------------------------------
# What has changed, by the kind of the check that does not hold
# ----------------------------------------------------------------------------------------------------------------------


def changes(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> Iterator[Change]:
    """Of the places that a guard looks at, which held objects that are others now."""
    kind, *rest = fact.check
    if kind == "dict":
        yield from in_a_dict(fact.record.source, *rest)
    elif kind == "class":
        cls, entries = rest[:2]
        for name, then in entries.items():
            # (one of those is an input from then on: ``generalize_guards``)
            if not issubclass(type(then), torch.Tensor):
                yield f"{fact.record.source}.{name}", unwrapped(then), unwrapped(look_up(cls, name))
    elif kind == "function":
        function, _, defaults, by_keyword = rest
        yield f"{fact.record.source}.__defaults__", defaults or (), function.__defaults__
        now = function.__kwdefaults__ or {}
        for key, then in (by_keyword or {}).items():
            yield f"{fact.record.source}.{key}", then, now.get(key, ABSENT)
    elif kind == "answers":
        yield from ((fact.record.source, then, ABSENT) for _, then in rest[0])
    elif kind == "is":
        yield fact.record.source, rest[1], met(fact, args, kwargs)
    elif kind == "contents" and issubclass(type(now := met(fact, args, kwargs)), set | frozenset):
        items: Any = set if issubclass(type(now), set) else frozenset
        yield from keys_that_went(fact.record.source, rest[1], items.__iter__(now))


def in_a_dict(name: str, the_dict: dict, entries: dict[Any, Any], keys: tuple | None) -> Iterator[Change]:
    """The entry that changed, and keys that it has no more."""
    if (key := changed_key(the_dict, entries)) is not None and not issubclass(type(entries[key]), torch.Tensor):
        yield record_name(name, key), entries[key], dict.get(the_dict, key, ABSENT)
    yield from keys_that_went(name, (*entries, *(keys or ())), dict.keys(the_dict))


def keys_that_went(name: str, then: Any, now: Any) -> Iterator[Change]:
    """Objects that were keys of a dict, or in a set. (By identity: what their class says of equality is not asked.)"""
    there = {id(key) for key in now}
    for key in then:
        if type(key) not in ATOMS and id(key) not in there:
            yield f"{name}'s {type(key).__name__}", key, ABSENT
