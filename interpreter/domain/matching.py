"""Structural pattern matching (PEP 634; Python/ceval.c match_keys and match_class)."""
from __future__ import annotations

import operator
from typing import Any

from ..sentinels import UNSET
from ..tables.texts import NOT_A_CLASS_PATTERN
from .core import Core, flags_of, is_class, type_name

TPFLAGS_SEQUENCE, TPFLAGS_MAPPING, TPFLAGS_MATCH_SELF = 1 << 5, 1 << 6, 1 << 22


class Matching(Core):
    """What case patterns ask of their subject."""

    def match_mapping(self, subject: Any) -> bool:
        return bool(flags_of(self.class_of(subject)) & TPFLAGS_MAPPING)

    def match_sequence(self, subject: Any) -> bool:
        return bool(flags_of(self.class_of(subject)) & TPFLAGS_SEQUENCE)

    def match_keys(self, subject: Any, keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The values for all of `keys`, or None."""
        if not keys:
            return ()
        seen: set[Any] = set()
        values = []
        getter = None
        absent = object()
        for key in keys:
            if self.native(operator.contains, seen, key):
                raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
            self.native(seen.add, key)
            if getter is None:
                getter = self.get_attr(subject, "get")
            value = self.call(getter, [key, absent], {})
            if value is absent:
                return None
            values.append(value)
        return tuple(values)

    def match_class(self, subject: Any, cls: Any, count: int, names: tuple[str, ...]) -> tuple[Any, ...] | None:
        """The attributes that the sub-patterns match, or None."""
        if not is_class(cls):
            raise TypeError(NOT_A_CLASS_PATTERN)
        if not self.is_instance(subject, cls):
            return None
        found: list[Any] = []
        seen: set[str] = set()
        if count:
            self.match_positional(subject, cls, count, found, seen)
            if found and found[-1] is UNSET:
                return None
        for name in names:
            value = self.match_attr(subject, cls, name, seen)
            if value is UNSET:
                return None
            found.append(value)
        return tuple(found)

    def match_positional(self, subject: Any, cls: type, count: int, found: list[Any], seen: set[str]) -> None:
        match_args = self.get_attr_or(cls, "__match_args__", UNSET)
        match_self = match_args is UNSET and bool(flags_of(cls) & TPFLAGS_MATCH_SELF)
        if match_args is UNSET:
            match_args = ()
        elif type(match_args) is not tuple:
            raise TypeError(
                f"{type_name(cls)}.__match_args__ must be a tuple (got {type_name(type(match_args))})"
            )
        allowed = 1 if match_self else len(match_args)
        if allowed < count:
            plural = "" if allowed == 1 else "s"
            raise TypeError(f"{type_name(cls)}() accepts {allowed} positional sub-pattern{plural} ({count} given)")
        if match_self:
            found.append(subject)
            return
        for name in match_args[:count]:
            if type(name) is not str:
                raise TypeError(f"__match_args__ elements must be strings (got {type_name(type(name))})")
            value = self.match_attr(subject, cls, name, seen)
            found.append(value)
            if value is UNSET:
                return

    def match_attr(self, subject: Any, cls: type, name: str, seen: set[str]) -> Any:
        if name in seen:
            raise TypeError(f"{type_name(cls)}() got multiple sub-patterns for attribute {name!r}")
        seen.add(name)
        return self.get_attr_or(subject, name, UNSET)
