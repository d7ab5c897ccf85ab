"""PEP 695 type parameters and aliases (3.12 and later), whose bounds and values are evaluated late, by interpreted code."""
from __future__ import annotations

import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

# Only the compiler makes a lazily evaluated TypeVar or alias: natively compiled templates call back for the value.
TEMPLATES = """
def bound(evaluate):
    def holder[T: evaluate()](): pass
    return holder.__type_params__[0]
def constrained(evaluate):
    def holder[T: (evaluate(), evaluate())](): pass
    return holder.__type_params__[0]
def alias(evaluate):
    type T = evaluate()
    return T
"""
DEFAULT_TEMPLATE = """
def default(evaluate):
    def holder[T = evaluate()](): pass
    return holder.__type_params__[0]
"""


def template(name: str, source: str, spelled: str) -> Callable[[Any], Any]:
    """The template function `name`, its parameter T spelled as the user's."""
    namespace: dict[str, Any] = {}
    exec(compile(source.replace("[T", f"[{spelled}").replace("type T ", f"type {spelled} ").replace("return T", f"return {spelled}"), "<type parameter>", "exec"), namespace)
    found = namespace[name]
    assert isinstance(found, FunctionType)
    return found


def lazy(domain: Any, function: Any) -> Callable[[], Any]:
    return lambda: domain.call(function, [], {})


def subscript_generic(domain: Any, params: Any, second: Any) -> Any:
    unpacked = tuple(
        domain.next_item(domain.get_iter(param)) if isinstance(param, typing.TypeVarTuple) else param for param in params
    )
    return domain.get_item(typing.Generic, unpacked)


def set_function_type_params(domain: Any, function: Any, params: Any) -> Any:
    function.__type_params__ = params
    return function


INTRINSICS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "typevar": lambda domain, name, second: typing.TypeVar(name, infer_variance=True),  # type: ignore
    "paramspec": lambda domain, name, second: typing.ParamSpec(name, infer_variance=True),  # type: ignore
    "typevartuple": lambda domain, name, second: typing.TypeVarTuple(name),  # type: ignore
    "subscript_generic": subscript_generic,
    "typevar_with_bound": lambda domain, name, evaluate: template("bound", TEMPLATES, name)(lazy(domain, evaluate)),
    "set_function_type_params": set_function_type_params,
}
