"""Members of enumerations that are numbers or texts (``IntEnum``, ``StrEnum``, ``class Act(str, Enum)``).

A member is known by its identity wherever it is found, and never changes: C code reads its number or text.
"""

from __future__ import annotations

import enum
from typing import Any

from moebius.interpreter import is_kind


def plain_member(value: Any) -> Any:
    """The number or text that C code takes a member for; anything else as itself."""
    if is_kind(value, enum.Enum):
        if is_kind(value, int):
            return int.__int__(value)
        if is_kind(value, float):
            return float.__float__(value)
        if is_kind(value, str):
            return str.__str__(value)
    return value


def hashes_by_name(cls: type) -> bool:
    """Whether instances hash as ``enum.Enum`` does and compare by identity."""
    return issubclass(cls, enum.Enum) and cls.__hash__ is enum.Enum.__hash__ and cls.__eq__ is object.__eq__
