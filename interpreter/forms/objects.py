"""str(), repr(), bool(), hash() and friends, where the object's dunder is Python."""
from __future__ import annotations

from typing import Any

from ..domain.core import is_a, special
from ..private_builtins import ORIGINAL as builtins
from .registry import form, operation

operation(str, "to_str", 1)
operation(builtins.repr, "to_repr", 1)
operation(bool, "truth", 1)


@form(builtins.format)
def format_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 1 <= len(args) <= 2 or (len(args) == 2 and not is_a(args[1], str)):
        return domain.native(format, *args, **kwargs)
    return domain.format_value(args[0], "", args[1] if len(args) == 2 else "")


def dunder_form(native: Any, dunder: str) -> None:
    """A C callable that is one dunder call: the result still passes through the native checks."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raw = None if kwargs or not args else special(type(args[0]), dunder)
        if raw is None:
            return domain.native(native, *args, **kwargs)
        return domain.native(native, result_holder(dunder, domain.call_special(raw, args[0], args[1:])))


def result_holder(dunder: str, value: Any) -> Any:
    """An object whose `dunder` returns `value`, so that the native callable checks it as it would the original's."""
    return type("Result", (), {dunder: lambda self: value})()


dunder_form(builtins.hash, "__hash__")
dunder_form(int, "__int__")
dunder_form(float, "__float__")
dunder_form(builtins.abs, "__abs__")
