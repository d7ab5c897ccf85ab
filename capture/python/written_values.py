"""Texts of traced values: ``f"{v}"``, ``str``, ``repr``, ``%``."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..heap.lifetimes import classes_in
from ..hook import ABSENT
from ..values.expert_numbers import number_of
from ..values.numbers import Number
from ..values.values import ATOMS, Break, TensorMethod, TensorProxy, UndefinedAfterLoop, type_of
from . import natives
from .enums import plain_member
from .open_sets import Sets
from .texts import texts

BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"), torch.Size: ("torch.Size([", "])")
}  # fmt: skip
WRITTEN_BY = {"s": "text_of", "r": "repr_of"}  # conversion -> method
CONVERSION = re.compile(r"%([^a-zA-Z%]*[a-zA-Z%])")


class WrittenValues(Sets):
    """What is written of a value."""

    def build_string(self, parts: list[str]) -> Any:
        return "".join(parts) if not self.texts.is_open(*parts) else self.texts.make(texts.joined, *parts)

    def format_value(self, value: Any, conversion: str, spec: Any) -> Any:
        if is_kind(value, TensorProxy) and not conversion and not value.fake.dim():
            known = number_of(value.node)  # a tensor without axes is formatted as its number is
            value = value if known is None else known
        if self.texts.is_open(value) and type(spec) in ATOMS:
            return self.texts.formatted(value, conversion, spec)
        if (conversion or not spec) and conversion != "a" and (parts := self.parts_of_text(value)) is not None:
            text = self.build_string(parts)
            return self.format_value(text, "", spec) if spec else text
        value = natives.specialised(value, self.calls.known)
        if self.has_plain_text(value):
            return super().format_value(value, conversion, spec)
        if conversion:
            return self.format_value(self.convert_value(value, conversion), "", spec)
        own = self.attributes.on_type(type_of(value), "__format__")
        if is_kind(own, types.FunctionType) and type(value) is type_of(value):
            text = self.call(self.attributes.bind(own, value, type(value)), [spec or ""], {})
            if type_of(text) is str:
                return text
            raise Break("text of a value that is not plain", "__format__ gives no str", "format it after the step")
        if spec and own is object.__format__ and type(spec) is str:
            raise TypeError(f"unsupported format string passed to {type_of(value).__name__}.__format__")
        if spec:
            raise Break(
                "text of a value that is not plain",
                f"a {type_of(value).__name__} is formatted",
                "format it after the step",
            )
        return self.text_of(value)

    def convert_value(self, value: Any, conversion: str) -> Any:
        if self.texts.is_open(value):
            return self.texts.formatted(value, conversion, "")
        if conversion != "a" and (parts := self.parts_of_text(value)) is not None:
            return self.build_string(parts)
        value = natives.specialised(value, self.calls.known)
        if self.has_plain_text(value):
            return super().convert_value(value, conversion)
        if conversion == "a":
            detail = f"the ascii form of a {type_of(value).__name__}"
            raise Break("text of a value that is not plain", detail, "format it after the step")
        return self.text_of(value) if conversion == "s" else self.repr_of(value)

    def text_of(self, value: Any = "", *encoding: Any) -> Any:
        """``str(value)``."""
        if self.texts.is_open(value) and not encoding:
            return self.texts.formatted(value, "s", "")
        if not encoding and (parts := self.parts_of_text(value)) is not None:
            return self.build_string(parts)
        value = natives.specialised(value, self.calls.known)
        if self.has_plain_text(value):
            return str(value, *encoding)
        if is_kind(value, BaseException) and self.objects.record_of(value) is None:
            return self.exception_text(value)
        if not is_kind(value, TensorProxy | UndefinedAfterLoop | TensorMethod):
            method = self.attributes.on_type(type(value), "__str__")
            if is_kind(method, types.FunctionType):
                return self.call(method, [value], {})
            if method is object.__str__:
                return self.repr_of(value)
            if plain_member(value) is not value:
                return str(value)  # C's, of a number or a text
        raise Break(
            "text of a value that is not plain", f"str() of a {type_of(value).__name__}", "print it after the step"
        )

    def exception_text(self, error: BaseException) -> Any:
        """``str(error)`` of one that the step made; its arguments may be the graph's."""
        method = self.attributes.on_type(type(error), "__str__")
        if is_kind(method, types.FunctionType):
            return self.call(method, [error], {})
        if method is BaseException.__str__:
            return "" if not error.args else self.text_of(error.args[0] if len(error.args) == 1 else error.args)
        if method is KeyError.__str__ and len(error.args) == 1:
            return self.repr_of(error.args[0])
        if not self.has_plain_text(error.args):
            raise Break("text of a value that is not plain", f"str() of a {type(error).__name__}", "keep its arguments")
        return str(error)

    def has_plain_text(self, value: Any) -> bool:
        """Whether C code may write the value down: a plain one. Of the classes in it, what they are called is read."""
        if not natives.is_plain(value, self.calls.known):
            return False
        for cls in classes_in(value):
            if is_kind(self.attributes.on_type(type(cls), "__repr__"), types.FunctionType):
                return False
            self.read_its_name(cls)
        return True

    def read_its_name(self, cls: type) -> None:
        for name in ("__qualname__", "__module__"):
            natives.specialised(self.attributes.get(cls, name))

    def repr_of(self, value: Any) -> Any:
        """``repr(value)``."""
        if self.texts.is_open(value):
            return self.texts.formatted(value, "r", "")
        if (parts := self.parts_of_text(value)) is not None:
            return self.build_string(parts)
        value = natives.specialised(value, self.calls.known)
        if self.has_plain_text(value):
            return repr(value)
        method = self.attributes.on_type(type(value), "__repr__") if not is_kind(value, TensorProxy) else ABSENT
        if is_kind(method, types.FunctionType):
            return self.call(method, [value], {})
        if method is type.__repr__:
            self.read_its_name(value)
            return repr(value)
        raise Break(
            "text of a value that is not plain", f"repr() of a {type_of(value).__name__}", "print it after the step"
        )

    def parts_of_text(self, value: Any) -> list[Any] | None:
        """Of a list, tuple, dict, set or size that holds more than plain values, or was there before the step: the
        texts that its own is made of, each item's ``repr`` in turn. None for whatever else."""
        if not self.is_open_display(value):
            return None
        kind, held = type(value), self.objects.contents(value)
        if kind is set:
            self.objects.settle_order(held)
        items = [*held.items()] if kind is dict else [(item,) for item in held]
        with self.texts.writing(value):
            written = [[self.repr_of(part) for part in item] for item in items]
        if [*map(id, items_of(self.objects.contents(value)))] != [id(part) for item in items for part in item]:
            detail = f"a {kind.__name__} is written to by a __repr__"
            raise Break("text of a value that is not plain", detail, "print it after the step")
        begin, end = BRACKETS[kind] if items or kind is not set else ("set(", ")")
        parts: list[Any] = [begin]
        for i, item in enumerate(written):
            parts += [", "] if i else []
            parts += item if kind is not dict else [item[0], ": ", item[1]]
        return [*parts, ",)" if kind is tuple and len(items) == 1 else end]

    def is_open_display(self, value: Any) -> bool:
        """Whether each of its items is asked for its text."""
        kind = type(value)
        if kind not in BRACKETS or (kind is not torch.Size and self.calls.known(value)):
            return kind in (list, dict, set)
        return id(value) in self.texts.being_written or not self.has_plain_text(value)

    def percent(self, text: str, values: Any) -> Any:
        """``text % values``."""
        is_row = type(values) is tuple or is_kind(values, tuple) and not self.calls.known(values)
        parts = (*tuple.__iter__(values),) if is_row else (values,)
        if is_kind(values, TensorProxy) and "%" not in text:
            return text  # it has items, as a mapping: nothing says that there are too many
        text, parts = self.with_texts(text, parts)
        if self.texts.is_open(*parts):
            return self.texts.make(texts.percent, text, *parts)
        values = natives.specialised(parts if is_row else values, self.calls.known)
        if not self.has_plain_text(values):
            raise Break("text of values that are not plain", "str % ...", "format plain values")
        return text % values

    def with_texts(self, text: str, parts: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The operands of ``%``: the texts of containers and objects, where ``%s`` or ``%r`` asks for these."""
        asked = [one[1] for one in CONVERSION.finditer(text) if one[1] != "%"]
        plain = [type(part) in ATOMS or self.texts.is_part(part) or is_kind(part, Number) for part in parts]
        held = [not is_it or self.is_open_display(part) for is_it, part in zip(plain, parts, strict=True)]
        if len(asked) != len(parts):
            return text, parts
        if any(one not in WRITTEN_BY for one, is_held in zip(asked, held, strict=True) if is_held):
            return text, parts
        left = iter(held)
        text = CONVERSION.sub(lambda one: "%s" if one[1] != "%" and next(left) else one[0], text)
        made = zip(asked, held, parts, strict=True)
        return text, tuple(getattr(self, WRITTEN_BY[one])(part) if is_it else part for one, is_it, part in made)


def items_of(display: Any) -> Iterator[Any]:
    """All that a display holds, keys too."""
    return (part for item in display.items() for part in item) if type(display) is dict else iter(display)
