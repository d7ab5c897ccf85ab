"""What is known of objects, by which object it is, until it dies.

No code of the object's class runs. (torch's ``WeakIdKeyDictionary`` asks each object for an attribute.)
"""

from __future__ import annotations

import weakref
from typing import Any


class WeakIds:
    """A table with objects for keys, each of which can be held weakly. An object that another one's address was is
    another key."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], Any]] = {}  # by id

    def get(self, key: Any, default: Any = None) -> Any:
        found = self.known.get(id(key))
        return default if found is None or found[0]() is not key else found[1]

    def __contains__(self, key: Any) -> bool:
        found = self.known.get(id(key))
        return found is not None and found[0]() is key

    def __setitem__(self, key: Any, value: Any) -> None:
        place, known = id(key), self.known

        def gone(reference: weakref.ref[Any]) -> None:
            if (found := known.get(place)) is not None and found[0] is reference:
                del known[place]

        known[place] = weakref.ref(key, gone), value
