"""``str.format`` and ``format_map``: each field of a text is found, converted and formatted as an f-string's is."""

from __future__ import annotations

from _string import formatter_field_name_split, formatter_parser  # what ``string.Formatter`` is made of
from collections.abc import Callable
from typing import Any

from ..values.values import Break

NESTED = 2  # a field's format may hold fields, whose formats may not (Objects/stringlib/unicode_format.h)
MIXED = "cannot switch from {} to {}"
BY_HAND, BY_ITSELF = "manual field specification", "automatic field numbering"


class Fields:
    """What the fields of one text stand for. named: the value of a name; positions: None where there are none."""

    def __init__(self, domain: Any, positions: list[Any] | None, named: Callable[[str], Any]):
        self.domain, self.positions, self.named = domain, positions, named
        self.next = 0
        self.numbering = ""

    def filled(self, text: str, depth: int = NESTED) -> Any:
        """The text with its fields filled in, left to right."""
        if not depth:
            raise ValueError("Max string recursion exceeded")
        parts: list[Any] = []
        for literal, field, spec, conversion in formatter_parser(text):
            parts.append(literal)
            if field is not None:
                value = self.value_of(field)
                if conversion not in (None, "s", "r", "a"):
                    raise Break("text of values that are not plain", f"conversion !{conversion}", "use an f-string")
                spec = self.filled(spec, depth - 1) if "{" in spec or "}" in spec else spec
                parts.append(self.domain.format_value(value, conversion or "", spec))
        return self.domain.build_string([part for part in parts if type(part) is not str or part])

    def value_of(self, field: str) -> Any:
        """``0.shape[1]``: an argument, then its attributes and items."""
        first, rest = formatter_field_name_split(field)
        value = self.named(first) if type(first) is str and first else self.at(first)
        for is_attribute, key in rest:
            value = self.domain.get_attr(value, key) if is_attribute else self.domain.get_item(value, key)
        return value

    def at(self, position: Any) -> Any:
        """An argument by its number, or the next one."""
        numbering = BY_ITSELF if position == "" else BY_HAND
        if self.numbering not in ("", numbering):
            raise ValueError(MIXED.format(self.numbering, numbering))
        self.numbering = numbering
        if position == "":
            position, self.next = self.next, self.next + 1
        if self.positions is None:
            raise ValueError("Format string contains positional fields")
        if position >= len(self.positions):
            raise IndexError(f"Replacement index {position} out of range for positional args tuple")
        return self.positions[position]
