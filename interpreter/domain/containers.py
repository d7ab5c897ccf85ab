"""Items, iteration, unpacking, and the containers and strings that displays and f-strings build."""
from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn
from weakref import CallableProxyType, ProxyType

from ..natives import merge_keywords
from ..sentinels import STOP
from ..tables import texts
from .core import (
    MISSING,
    PLAIN,
    Core,
    full_name,
    is_a,
    is_class,
    is_heap,
    is_subtype,
    lookup,
    special,
    type_name,
    wrong_type,
)

BARE_KEY_ERRORS = sys.version_info < (3, 12)
PLAIN_TEXT = PLAIN - {int}  # from 3.12 on C code calls Lib/_pylong.py for long ones
EXACT = frozenset({list, tuple, str, bytes, range})
# Iterators that never lead into Python code; a dict's or set's goes on in order without looking keys up.
SAMPLES: tuple[Any, ...] = ([], (), "", "é", b"", range(0), range(1 << 70), {}, {}.values(), {}.items(), set())
EXACT_ITERATORS = frozenset(type(iter(sample)) for sample in SAMPLES)


def asks_for_length(kind: Any) -> bool:
    def hint(self: Any) -> int:
        asked.append(self)
        return 0

    asked: list[Any] = []
    kind(type("Asked", (), {"__iter__": lambda self: iter(()), "__length_hint__": hint})())
    return bool(asked)


MEASURING = frozenset(kind for kind in (list, tuple) if asks_for_length(kind))  # tuple() no longer does, from 3.14 on


class Containers(Core):
    """Everything that reads or builds a container."""

    def get_item(self, obj: Any, key: Any) -> Any:
        tp = type(obj)
        if tp in EXACT and type(key) is int:
            return obj[key]
        raw = special(tp, "__getitem__")
        if raw is not None:
            return self.call_special(raw, obj, [key])
        if is_class(obj):
            return self.class_item(obj, key)
        if is_heap(tp) and is_subtype(tp, dict):
            missing = special(tp, "__missing__")
            if missing is not None:
                found = self.native(dict.get, obj, key, MISSING)
                return self.call_special(missing, obj, [key]) if found is MISSING else found
        return self.native(operator.getitem, obj, key)

    def class_item(self, cls: type, key: Any) -> Any:
        """`cls[key]`: the metaclass's __getitem__ was tried; then __class_getitem__."""
        if lookup(type(cls), "__getitem__") is MISSING and lookup(cls, "__class_getitem__") is not MISSING:
            return self.call(self.get_attr(cls, "__class_getitem__"), [key], {})
        return self.native(operator.getitem, cls, key)

    def set_item(self, obj: Any, key: Any, value: Any) -> None:
        raw = special(type(obj), "__setitem__")
        if raw is None:
            self.native(operator.setitem, obj, key, value)
        else:
            self.call_special(raw, obj, [key, value])

    def del_item(self, obj: Any, key: Any) -> None:
        raw = special(type(obj), "__delitem__")
        if raw is None:
            self.native(operator.delitem, obj, key)
        else:
            self.call_special(raw, obj, [key])

    def make_slice(self, *parts: Any) -> Any:
        return slice(*parts)

    def get_iter(self, value: Any) -> Any:
        tp = type(value)
        raw = special(tp, "__iter__")
        if raw is not None:
            iterator = self.call_special(raw, value, [])
            if lookup(type(iterator), "__next__") is MISSING:
                raise wrong_type(texts.NOT_AN_ITERATOR, iterator, value)
            return iterator
        if not self.interprets_callbacks and by_items(tp):
            return iterate_items(self, value)
        return iter(value) if tp in EXACT else self.native(iter, value)

    def next_item(self, iterator: Any) -> Any:
        """The next value, or STOP."""
        tp = type(iterator)
        if tp in EXACT_ITERATORS:
            return next(iterator, STOP)
        if is_heap(tp):
            raw = special(tp, "__next__")
            if raw is not None:
                try:
                    return self.call_special(raw, iterator, [])
                except StopIteration as error:
                    self.machine.swallow(error)
                return STOP
        return self.native(next, iterator, STOP)

    def unpack(self, value: Any, count: int) -> list[Any]:
        if type(value) in (tuple, list) and len(value) == count:
            return list(value)
        items, iterator = self.first_items(value, count, f"expected {count}")
        if self.next_item(iterator) is not STOP:
            counted = self.class_of(value) in (list, tuple, dict)
            known = texts.COUNTS_TOO_MANY and counted and len(value) > count
            got = f", got {len(value)}" if known else ""
            raise ValueError(f"too many values to unpack (expected {count}{got})")
        return items

    def unpack_ex(self, value: Any, before: int, after: int) -> list[Any]:
        """`before` items, one list, `after` items."""
        expected = f"expected at least {before + after}"
        items, iterator = self.first_items(value, before, expected)
        items += self.drain(iterator)
        if len(items) < before + after:
            raise ValueError(f"not enough values to unpack ({expected}, got {len(items)})")
        middle = len(items) - after
        return [*items[:before], items[before:middle], *items[middle:]]

    def first_items(self, value: Any, count: int, expected: str) -> tuple[list[Any], Any]:
        """So many items that are unpacked, and the iterator behind them."""
        tp = self.class_of(value)
        if not is_iterable(tp):
            raise TypeError(f"cannot unpack non-iterable {type_name(tp)} object")
        iterator = self.get_iter(value)
        items: list[Any] = []
        while len(items) < count:
            item = self.next_item(iterator)
            if item is STOP:
                raise ValueError(f"not enough values to unpack ({expected}, got {len(items)})")
            items.append(item)
        return items, iterator

    def drain(self, value: Any, hinted: bool = True) -> list[Any]:
        """All items of an iterable, its Python methods interpreted; `hinted`: C asks for its length first."""
        tp = type(value)
        if tp in EXACT:
            return list(value)
        items: list[Any] = []
        if self.interprets_callbacks and by_items(tp):
            self.native(items.extend, value)
            return items
        iterator = self.get_iter(value)
        if hinted:
            self.length_hint(value)
        if special(type(iterator), "__next__") is None:
            self.native(items.extend, iterator)
            return items
        while (item := self.next_item(iterator)) is not STOP:
            items.append(item)
        return items

    def length_hint(self, value: Any) -> None:
        """Objects/abstract.c PyObject_LengthHint, for its effects: what it asks `value`, and the errors it lets out."""
        tp = type(value)
        if not is_heap(tp):
            return
        if special(tp, "__len__") is not None:
            try:
                self.length(value)
                return
            except TypeError as error:
                self.machine.swallow(error)
        raw = special(tp, "__length_hint__")
        if raw is None or (special(tp, "__len__") is None and lookup(tp, "__len__") is not MISSING):
            return  # (a length in C is no matter of the user's)
        try:
            hint = self.call_special(raw, value, [])
        except TypeError as error:
            self.machine.swallow(error)
            return
        if hint is NotImplemented:
            return
        if not is_a(hint, int):
            raise wrong_type(texts.NOT_A_HINT, hint, value)
        if hint < 0:
            raise ValueError(texts.NEGATIVE_HINT.format(owner=full_name(tp)))

    def build_list(self, items: list[Any]) -> Any:
        return items

    def build_tuple(self, items: list[Any]) -> Any:
        return tuple(items)

    def build_set(self, items: list[Any]) -> Any:
        result: set[Any] = set()
        for item in items:
            self.set_add(result, item)
        return result

    def build_map(self, pairs: list[tuple[Any, Any]]) -> Any:
        result: dict[Any, Any] = {}
        for key, value in pairs:
            self.map_add(result, key, value)
        return result

    def build_string(self, parts: list[str]) -> Any:
        return "".join(parts)

    def build_interpolation(self, value: Any, expression: str, conversion: str | None, spec: Any) -> Any:
        """What stands in braces in a template string (PEP 750); conversion is None, 's', 'r' or 'a'."""
        from string.templatelib import Interpolation

        return Interpolation(value, expression, conversion, spec)

    def build_template(self, strings: tuple[str, ...], interpolations: tuple[Any, ...]) -> Any:
        """A template string; one string more than interpolations."""
        from string.templatelib import Template

        return Template(strings[0], *(part for pair in zip(interpolations, strings[1:], strict=True) for part in pair))

    def convert_value(self, value: Any, conversion: str) -> Any:
        """!s, !r or !a: 's', 'r', 'a'."""
        if conversion == "s":
            return self.to_str(value)
        if conversion == "r":
            return self.to_repr(value)
        return self.to_repr(value).encode("ascii", "backslashreplace").decode("ascii")

    def to_str(self, value: Any) -> str:
        raw = special(type(value), "__str__")
        if raw is None and lookup(type(value), "__str__") is object.__str__:
            return self.to_repr(value)
        if raw is None:
            return str(value) if type(value) in PLAIN_TEXT else self.native(str, value)
        return checked_str(self.call_special(raw, value, []), "__str__ returned non-string (type {})")

    def to_repr(self, value: Any) -> str:
        raw = special(type(value), "__repr__")
        if raw is None:
            return self.native(repr, value)
        return checked_str(self.call_special(raw, value, []), "__repr__ returned non-string (type {})")

    def format_value(self, value: Any, conversion: str, spec: Any) -> Any:
        """`{value!conversion:spec}`; conversion is '', 's', 'r' or 'a'."""
        if conversion:
            value = self.convert_value(value, conversion)
        tp = type(value)
        if tp is str and spec == "":
            return value
        raw = special(tp, "__format__")
        if raw is None:
            if lookup(tp, "__format__") is object.__format__ and spec == "":
                return self.to_str(value)
            return format(value, spec) if tp in PLAIN_TEXT else self.native(format, value, spec)
        return checked_str(self.call_special(raw, value, [spec]), "__format__ must return a str, not {}")

    def list_append(self, target: list[Any], value: Any) -> None:
        target.append(value)

    def list_extend(self, target: list[Any], values: Any) -> None:
        tp = type(values)
        if tp in EXACT:
            target.extend(values)
            return
        if not is_iterable(tp):
            raise TypeError(f"Value after * must be an iterable, not {type_name(tp)}")
        if self.interprets_callbacks and by_items(tp):
            self.native(target.extend, values)
            return
        iterator = self.get_iter(values)
        self.length_hint(values)
        if special(type(iterator), "__next__") is None:
            self.native(target.extend, for_c(iterator))
            return
        while (item := self.next_item(iterator)) is not STOP:
            target.append(item)

    def list_to_tuple(self, values: list[Any]) -> Any:
        return tuple(values)

    def set_add(self, target: set[Any], value: Any) -> None:
        if not issubclass(type(target), set):  # a program's own `__conditional_annotations__` (3.14)
            raise TypeError(f"{type_name(type(target))!r} object is not a set")
        if type(value) in PLAIN:
            set.add(target, value)
        else:
            self.native(set.add, target, value)

    def set_update(self, target: set[Any], values: Any) -> None:
        if type(values) in EXACT:
            self.native(target.update, values)
            return
        iterator = self.get_iter(values)
        while (item := self.next_item(iterator)) is not STOP:
            self.set_add(target, item)

    def map_add(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        if type(key) in PLAIN:
            target[key] = value
        else:
            self.native(operator.setitem, target, key, value)

    def dict_update(self, target: dict[Any, Any], other: Any) -> None:
        """`{**other}`."""
        if by_entries(other):
            self.native(target.update, other)
            return
        keys = self.keys_of(other)
        if keys is MISSING:
            raise wrong_type(texts.NOT_A_MAPPING, other)
        for key, value in self.mapping_items(other, keys):
            self.map_add(target, key, value)

    def dict_merge(self, target: dict[Any, Any], other: Any, function: Any) -> None:
        """`f(**other)`: like dict_update, but no key twice."""
        entries = by_entries(other)
        keys = MISSING if entries else self.keys_of(other)
        if keys is MISSING and not entries:
            if texts.ASKS_TWICE:
                self.keys_of(other)
            raise wrong_type(texts.STARS_IN_CALL, other, function=lambda: self.function_text(function))
        if not entries:
            self.merge_unique(target, self.mapping_items(other, keys), function)
        elif all(type(key) is str for key in dict.keys(other)):
            self.merge_unique(target, dict.items(other), function)
        else:
            self.merge_entries(target, other, function)

    def function_text(self, function: Any) -> str:
        """How CPython names a callable in errors about its arguments (_PyObject_FunctionStr)."""
        name = self.get_attr_or(function, "__qualname__", None)
        if not is_a(name, str):
            return self.to_str(function)
        module = self.get_attr_or(function, "__module__", None)
        if is_a(module, str) and module != "builtins":
            return f"{module}.{name}()"
        return f"{name}()"

    def merge_unique(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]], function: Any) -> None:
        for key, value in pairs:
            if key in target if type(key) is str else self.native(operator.contains, target, key):
                self.key_twice(key, function)
            self.map_add(target, key, value)

    def merge_entries(self, target: dict[Any, Any], other: dict[Any, Any], function: Any) -> None:
        """A dict with keys that are no plain strings: merged by the hashes that it holds, for their __eq__.

        As Python/ceval.c format_kwargs_error does, any KeyError is taken for that of a key that is there twice.
        """
        try:
            self.native(merge_keywords, target, other)
            return
        except KeyError as error:
            if len(error.args) != 1:
                raise
            key = self.machine.swallow(error).args[0]
        self.key_twice(key, function)

    def key_twice(self, key: Any, function: Any) -> NoReturn:
        """Python/ceval.c format_kwargs_error. 3.11 knows the error by its being no exception object yet, which it is

        while another is handled.
        """
        if BARE_KEY_ERRORS and self.machine.handled() is not None:
            raise KeyError(key)
        shown = self.to_str(key)
        raise TypeError(f"{self.function_text(function)} got multiple values for keyword argument '{shown}'")

    def keys_of(self, other: Any) -> Any:
        """The bound method `keys`, or MISSING."""
        try:
            return self.get_attr(other, "keys")
        except AttributeError as error:
            self.machine.swallow(error)
        return MISSING

    def mapping_items(self, other: Any, keys: Any) -> Iterable[tuple[Any, Any]]:
        """dict.update's protocol: keys(), then an item at a time."""
        found = self.call(keys, [], {})
        try:
            iterator = self.get_iter(found)
        except TypeError as error:
            self.machine.swallow(error)
            iterator = None
        if iterator is None:
            raise wrong_type(texts.NOT_KEYS, found, other)
        while (key := self.next_item(iterator)) is not STOP:
            yield key, self.get_item(other, key)


def by_entries(other: Any) -> bool:
    """Objects/dictobject.c dict_merge: of a dict that is iterated as one, entries are taken; keys() is not asked."""
    return is_a(other, dict) and lookup(type(other), "__iter__") is dict.__iter__


def iterate_items(domain: Containers, obj: Any) -> Iterator[Any]:
    """The old sequence protocol: obj[0], obj[1], … until IndexError or StopIteration."""
    index = 0
    while True:
        try:
            value = domain.get_item(obj, index)
        except (IndexError, StopIteration) as error:
            domain.machine.swallow(error)
            return
        yield value
        index += 1


class Given:
    """An iterable whose iterator is the given one."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self.iterator


def for_c(iterator: Any) -> Any:
    """What C code walks that takes an iterable: iter() of a weak proxy would ask the object behind it."""
    return Given(iterator) if type(iterator) in (ProxyType, CallableProxyType) else iterator


def by_items(tp: type) -> bool:
    """Whether such an object is iterated by the old sequence protocol, with a __getitem__ in Python."""
    return special(tp, "__getitem__") is not None and lookup(tp, "__iter__") is MISSING


def is_iterable(tp: type) -> bool:
    if lookup(tp, "__iter__") not in (MISSING, None):
        return True
    return lookup(tp, "__iter__") is MISSING and lookup(tp, "__getitem__") is not MISSING


def checked_str(value: Any, message: str) -> str:
    if not is_a(value, str):
        raise TypeError(message.format(type_name(type(value))))
    return value

