"""Methods of containers that the domain answers itself: how many arguments each takes, and who says that it is wrong.

With another number of them, or with keywords that the method does not know, the method of an empty container of that
type is called: it raises Python's own error before it does anything.
"""

from __future__ import annotations

import collections
from typing import Any

from ..heap.records import DICTS, LISTS

# The fewest and the most. What is not named here is called as it is, on the container itself.
OF_DICTS = {
    "pop": (1, 2), "get": (1, 2), "setdefault": (1, 2), "update": (0, 1),
    "__getitem__": (1, 1), "__setitem__": (2, 2), "__delitem__": (1, 1), "__contains__": (1, 1),
}  # fmt: skip
OF_LISTS = {"append": (1, 1), "extend": (1, 1), "sort": (0, 0), "__getitem__": (1, 1)}
OF_ALL = {"__eq__": (1, 1), "__ne__": (1, 1)}
KEYWORDS = {"sort": {"key", "reverse"}}
NAMED = {"pop": ("key", "default"), "setdefault": ("key", "default")}  # OrderedDict's


def positional(base: type, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments, by their places where an OrderedDict's method has names for them."""
    names = NAMED.get(name, ()) if base is collections.OrderedDict else ()
    rest = names[len(args) :]
    if not kwargs or set(kwargs) != set(rest[: len(kwargs)]):
        return args, kwargs
    return [*args, *(kwargs[k] for k in rest[: len(kwargs)])], {}


def check(base: type, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raises the TypeError that the method raises where it does not take these arguments."""
    table = OF_DICTS if base in DICTS else OF_LISTS if base in LISTS else {}
    if name not in table and name not in OF_ALL:
        return
    low, high = table.get(name) or OF_ALL[name]
    known = name == "update" or kwargs.keys() <= KEYWORDS.get(name, set())
    if not (low <= len(args) <= high and known):
        getattr(base, name)(base(), *args, **kwargs)
