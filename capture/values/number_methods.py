"""Attributes and methods of numbers that only the running step knows: ``lr.is_integer()``, ``n.bit_length()``."""

from __future__ import annotations

import types
from typing import Any

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import type_name

from .numbers import Arithmetic, Number
from .numpy_numbers import NUMPY_NUMBERS, is_pure_method
from .residual_program import Expression, Residual
from .values import Break, SymbolicObject, type_of

METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
DATA = (types.GetSetDescriptorType, types.MemberDescriptorType)


class NumberMethod(SymbolicObject, named="builtin_function_or_method"):
    """``number.name``, not yet called. function: of the number's type, in C."""

    __slots__ = ("function", "kind", "number", "numbers")
    kind: type

    def __init__(self, numbers: Arithmetic, function: Any, number: Any):
        self.numbers, self.function, self.number = numbers, function, number
        self.kind = types.BuiltinMethodType if type(function) is METHODS[0] else types.MethodWrapperType

    def attribute(self, name: str) -> Any:
        if name == "__self__":
            return self.number
        return getattr(self.function, name) if name in ("__name__", "__qualname__") else super().attribute(name)

    def expression(self, emitter: Residual) -> Expression:
        return emitter.call(getattr, self.number, self.function.__name__)

    def call(self, args: list, kwargs: dict[str, Any]) -> Any:
        return self.numbers.apply(self.function, self.number, *args, method=self.function.__name__, **kwargs)


def attribute_of(numbers: Arithmetic, number: Any, name: str) -> Any:
    """``number.name``. number: symbolic, or the graph's."""
    kind = type_of(number)
    found: Any = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
    if found is None:
        raise AttributeError(f"{type_name(kind)!r} object has no attribute {name!r}")
    if kind in NUMPY_NUMBERS and is_kind(found, METHODS) and not is_pure_method(kind, name):
        raise Break("method in C", f"numpy.{kind.__name__}.{name} may do more than compute", "it runs natively")
    if is_kind(found, METHODS) and found.__objclass__ is not object:
        return NumberMethod(numbers, found, number)
    if is_kind(found, DATA) and name != "__class__":
        return numbers.apply(getattr, number, name)
    if name == "__class__":
        return kind
    known = numbers.open(number)
    return getattr(numbers.constant(known) if is_kind(known, Number) else known, name)
