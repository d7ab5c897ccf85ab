"""Sources: how an object that tracing met is reached again.

A source is *static* when the very object is known to be the same at each call (it hangs from an object whose identity
is guarded, and the place that it hangs from is guarded too): then a reference to the object serves. Otherwise it is
*dynamic*: a path from the call's arguments, walked by the guards on each call and by the residual code that needs it.
Provenance belongs to the place that was read, never to the value found there (two places may hold one shared ``None``).
Nobody changes a source. (They are not frozen dataclasses: a trace makes thousands, and those take three times as long.)
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from moebius.interpreter import is_kind

STACK = re.compile(r"L\['m_stack\w*'\]")  # how a continuation names what stood on its frame's stack
INDEX = re.compile(r"\[\d+\]")
ITEMS = ("list_item", "tuple_item")
LEFT = "what the graph break left"
NAMES = (  # how sources are named, and what the user's program says for it
    (re.compile(r"\b[LG](?:\([\w.]+\))?\['([^']+)'\]"), r"\1"),
    (re.compile(r"\bG\(([\w.]+)\)(?![\w.\[])"), r"the globals of \1"),
    (re.compile(r"\bclosure (?:[\w<>]+\.)*(\w+)\.cell_contents\b"), r"\1"),
    (re.compile(r"(?<![\w.'\"])_[A-Z]\w*\.(\w+)"), r"\1"),  # a function of a class that nobody imports
    (re.compile(r"\._modules\['(\d+)'\]"), r"[\1]"),
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]"), r".\1"),
)


def for_people(name: str) -> str:
    """The name of a place without the names that only a continuation's code has."""
    return STACK.sub(LEFT, name)


def as_written(text: str) -> str:
    """A text for people with the places in it as the user's program names them: ``model[0].weight`` for
    ``L['model']._modules['0']._parameters['weight']``."""
    text = for_people(text)
    for pattern, name in NAMES:
        text = pattern.sub(name, text)
    return text


@functools.lru_cache(4096)
def family(name: str) -> str:
    """The name of a place, all items of a list being one."""
    return INDEX.sub("[]", name)


class OpenPlaces(frozenset[str]):
    """Names of places whose values are no constants. Where that is so of two items of a list, or of what two hold, it
    is so of all: some are the same in two calls by chance."""

    families: frozenset[str]

    def __new__(cls, names: Iterable[str]) -> OpenPlaces:
        self = super().__new__(cls, names)
        alike = Counter(family(name) for name in self if name.find("[") >= 0)
        self.families = frozenset(kind for kind, count in alike.items() if count > 1)
        return self

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return bool(self.families) and is_kind(name, str) and family(name) in self.families

    def __or__(self, names: Iterable[str]) -> OpenPlaces:  # type: ignore[override]
        return OpenPlaces((*self, *names))


@dataclass(eq=False, slots=True)
class Source:
    """Base of all sources. ``name`` is what a report shows: ``L['batch'].labels``."""

    name: str

    @property
    def static(self) -> bool:
        """Whether the object itself, not a path to it, is what we know."""
        return False

    def slot(self) -> tuple[Any, ...]:
        """The guard program's instruction that fetches it: (operation, sources that it starts from, operand...)."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Static(Source):
    """The object itself. ``via``: the dynamic source whose identity check makes it static, for an argument."""

    obj: Any = field(repr=False)
    via: Source | None = None

    @property
    def static(self) -> bool:
        return True

    def slot(self) -> tuple[Any, ...]:
        return ("const", (), self.obj)


@dataclass(eq=False, slots=True)
class Arg(Source):
    """The ``index``-th object of the call: positionals first, then keywords in the order given."""

    index: int

    def slot(self) -> tuple[Any, ...]:
        return ("arg", (), self.index)


@dataclass(eq=False, slots=True)
class Part(Source):
    """A part of another source.

    operation: one of dict_item, instance_dict, list_item, tuple_item, attr, cell, python. operand: key, index or name;
    what gives it, called with the parent's object.
    """

    parent: Source
    operation: str
    operand: Any = None

    def slot(self) -> tuple[Any, ...]:
        operands = () if self.operation in ("instance_dict", "cell") else (self.operand,)
        return (self.operation, (self.parent,), *operands)


@dataclass(eq=False, slots=True)
class Computed(Source):
    """What ``function`` gives for the objects of some sources."""

    parents: tuple[Source, ...]
    function: Callable[..., Any]

    def slot(self) -> tuple[Any, ...]:
        return ("python", self.parents, self.function)


def part(parent: Source, operation: str, operand: Any = None) -> Part:
    """The named part of ``parent``, with the name that a report shows."""
    return Part(part_name(parent, operation, operand), parent, operation, operand)


def part_name(parent: Source, operation: str, operand: Any = None) -> str:
    """How a report writes that part: ``parent[key]``, ``parent.attribute``."""
    if operation == "dict_item" and is_kind(parent, Part | Static) and parent.name.endswith(".__dict__"):
        return f"{parent.name.removesuffix('.__dict__')}.{operand}"
    if operation in ("dict_item", "list_item", "tuple_item"):
        plain = is_kind(operand, str | int | float | bool | bytes | None)
        key = repr(operand) if plain else f"<{type(operand).__name__}>"
        return f"{parent.name}[{key}]"
    if operation == "instance_dict":
        return f"{parent.name}.__dict__"
    if operation == "cell":
        return f"{parent.name}.cell_contents"
    return f"{parent.name}.{operand}"


def is_item(source: Source) -> bool:
    """Whether it is an item of a list or tuple."""
    return is_kind(source, Part) and source.operation in ITEMS


def is_same_place(a: Source, b: Source) -> bool:
    """Whether two sources are one path from the call's arguments."""
    if a is b:
        return True
    if type(a) is not type(b) or a.static or b.static:
        return False
    if is_kind(a, Part) and is_kind(b, Part):
        alike = a.operation == b.operation and type(a.operand) is type(b.operand) and a.name == b.name
        fixed = a.operand is b.operand or (type(a.operand) in (int, str) and a.operand == b.operand)
        return alike and fixed and is_same_place(a.parent, b.parent)
    return is_kind(a, Arg) and is_kind(b, Arg) and a.index == b.index


def from_arguments(source: Source) -> Source:
    """The same path starting at the call's argument where it came from one: a reference to no object of the user's."""
    if is_kind(source, Static):
        return source if source.via is None else from_arguments(source.via)
    if is_kind(source, Part):
        return Part(source.name, from_arguments(source.parent), source.operation, source.operand)
    if is_kind(source, Computed):
        return Computed(source.name, tuple(map(from_arguments, source.parents)), source.function)
    return source


def with_values(sources: tuple[Source, ...], values: tuple) -> str:
    """`` (L['it'] is 4)``, for each number."""
    plain = [f"{s.name} is {v!r}" for s, v in zip(sources, values, strict=True) if type(v) in (int, float, bool)]
    return f" ({', '.join(plain)})" if plain else ""
