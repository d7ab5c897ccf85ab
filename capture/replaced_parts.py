"""A part of a model that another one replaces while the model stays: ``model.head = nn.Linear(…)``; a class's likewise.

What was captured for the old part keeps it alive, as the guards hold the dicts of its attributes. The next call lets it
go, unless the step takes such parts in turns: one that comes back is kept from then on, with the others at its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .guards.program import changed_key
from .guards.recorder import Fact
from .opening import record_name


class ReplacedParts:
    """Of one captured callable. gone: parts whose captures went. in_turns: names of places where one came back."""

    def __init__(self) -> None:
        self.gone: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.in_turns: set[str] = set()

    def goes(self, fact: Fact) -> bool:
        """Whether what was captured goes, whose guard this is that does not hold."""
        return any([self.is_replaced(*change) for change in changes(fact)])

    def is_replaced(self, place: str, then: Any, now: Any) -> bool:
        """Whether one module took another one's place, and not for the while."""
        if then is now or not isinstance(then, torch.nn.Module) or not isinstance(now, torch.nn.Module):
            return False
        if now in self.gone:
            self.in_turns.add(place)
        if place in self.in_turns:
            return False
        self.gone.add(then)
        return True


def changes(fact: Fact) -> Iterator[tuple[str, Any, Any]]:
    """(place, what it held, what it holds) of the entries that a guard on a dict or class looks at."""
    kind, *rest = fact.check
    if kind == "dict":
        the_dict, entries, _ = rest
        if (key := changed_key(the_dict, entries)) is not None:
            yield record_name(fact.record.source, key), entries[key], dict.get(the_dict, key)
    elif kind == "class":
        cls, entries = rest[:2]
        for name, then in entries.items():
            held = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            yield f"{fact.record.source}.{name}", then, held
