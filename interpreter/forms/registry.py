"""Where forms register."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..domain.core import is_a

Form = Callable[[Any, list[Any], dict[str, Any]], Any]
FORMS: dict[int, Form] = {}
METHOD_FORMS: dict[tuple[type, str], Form] = {}
HELD: list[Any] = []  # keeps the callables alive whose ids are the keys


def form(*callables: Any) -> Callable[[Form], Form]:
    """Register a form for C callables, by identity."""

    def register(function: Form) -> Form:
        for callee in callables:
            FORMS[id(callee)] = function
            HELD.append(callee)
        return function

    return register


def operation(native: Any, method: str, count: int, named: bool = False) -> None:
    """Register a C callable that is one operation of the domain's, of so many arguments; with others Python's own says
    what is wrong. named: whether the second one is a name."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != count or (named and not is_a(args[1], str)):
            return domain.native(native, *args, **kwargs)
        return getattr(domain, method)(*args)


def method_form(owner: type, name: str) -> Callable[[Form], Form]:
    """Register a form for a C method, bound or not. Its first argument is the object."""

    def register(function: Form) -> Form:
        descriptor = owner.__dict__[name]
        FORMS[id(descriptor)] = function
        HELD.append(descriptor)
        METHOD_FORMS[owner, name] = function
        return function

    return register
