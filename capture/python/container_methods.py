"""What the methods of containers do: a row for each, from which everything is taken that is asked of their names."""

from __future__ import annotations

import collections

KINDS: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, tuple)}
KINDS |= {"deque": collections.deque, "ordered": collections.OrderedDict}
# method -> whose it is, and whether it changes the container, adds (all is still there that was), takes a key or item
# first, takes iterables
ROWS = {
    "append": "list deque: changes adds",
    "appendleft": "deque: changes adds",
    "extend": "list deque: changes adds iterable",
    "extendleft": "deque: changes adds iterable",
    "insert": "list: changes adds",
    "add": "set: changes adds key",
    "pop": "list dict set deque: changes key",
    "popleft": "deque: changes",
    "popitem": "dict: changes",
    "clear": "list dict set deque: changes",
    "remove": "list set: changes key",
    "discard": "set: changes key",
    "reverse": "list deque: changes",
    "rotate": "deque: changes",
    "sort": "list: changes",
    "copy": "list dict set deque:",
    "index": "list tuple:",
    "count": "list tuple:",
    "get": "dict: key",
    "items": "dict:",
    "keys": "dict:",
    "values": "dict:",
    "setdefault": "dict: changes key",
    "update": "dict set: changes iterable",
    "move_to_end": "ordered: changes key",
    "union": "set: iterable",
    "intersection": "set: iterable",
    "difference": "set: iterable",
    "symmetric_difference": "set: iterable",
    "issubset": "set: iterable",
    "issuperset": "set: iterable",
    "isdisjoint": "set: iterable",
    "difference_update": "set: changes iterable",
    "intersection_update": "set: changes iterable",
    "__getitem__": "list dict tuple deque: key",
    "__setitem__": "list dict: changes key",
    "__delitem__": "list dict: changes key",
    "__contains__": "dict set: key",
    "__len__": "list dict set tuple deque:",
    "__iter__": "list dict set tuple deque:",
    "__reversed__": "list dict:",
    "__iadd__": "list: changes iterable",
    "__add__": "list tuple:",
    "__mul__": "list tuple:",
    "__or__": "dict set:",
    "__ior__": "dict: changes iterable",
    "__and__": "set:",
    "__sub__": "set:",
}
# Those that compare or print items, by kind; the others only move them about.
COMPARING: dict[type, tuple[str, ...]] = {list: ("index", "count", "remove", "sort"), tuple: ("index", "count")}

# What C code calls of a class derived from a container: to make another of it (odict_copy, defdict_copy, deque_copy),
# and to read it as a mapping, unless dict's own __iter__ goes through it (Objects/dictobject.c dict_merge).
CALLED_TO_MAKE: dict[type, tuple[str, ...]] = {
    dict: (),
    collections.OrderedDict: ("__init__", "__new__", "__setitem__"),
    collections.defaultdict: ("__init__", "__new__", "copy"),
    collections.deque: ("__init__", "__new__"),
}
MAKING = frozenset(("copy", "__or__", "__add__", "__mul__"))
CALLED_TO_READ = ("keys", "__getitem__")
# What OrderedDict's own methods come to, of a class derived from it (Objects/odictobject.c).
CALLING = frozenset(("pop", "popitem", "setdefault"))
CALLED_TO_CHANGE = ("__contains__", "__getitem__", "__setitem__", "__delitem__")


def that(what: str) -> frozenset[str]:
    """The methods of which a row says so."""
    return frozenset(name for name, row in ROWS.items() if what in row.split(":")[1].split())


CHANGING, ADDING, KEYED, ITERABLE_ARGUMENT = map(that, ("changes", "adds", "key", "iterable"))
# by kind: method -> True when it only moves items about (items may be anything); False when it compares or prints them
CONTAINER_METHODS: dict[type, dict[str, bool]] = {
    kind: {name: name not in COMPARING.get(kind, ()) for name, row in ROWS.items() if word in row.split(":")[0].split()}
    for word, kind in KINDS.items()
}
CONTAINER_METHODS[collections.OrderedDict] |= CONTAINER_METHODS[dict]
CONTAINER_METHODS[collections.defaultdict] = CONTAINER_METHODS[dict]
CONTAINER_METHODS[frozenset] = {name: moves for name, moves in CONTAINER_METHODS[set].items() if name not in CHANGING}
