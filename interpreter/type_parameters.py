"""PEP 695 and 696: type parameters and aliases (3.12 and later), their bounds and values evaluated late.

Only CPython's intrinsics make these objects with late evaluation, and only bytecode reaches the intrinsics: a small
native function is patched to hold the one wanted. The evaluation functions are interpreted.
"""
from __future__ import annotations

import dis
import sys
import typing
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from .forms.registry import form
from .natives import DICT_GET, IN_BETWEEN

# the argument of CALL_INTRINSIC_1 or CALL_INTRINSIC_2, as in tables/v312.py and v313.py
ONE = {"typevar": 7, "paramspec": 8, "typevartuple": 9, "typealias": 11}
TWO = {
    "typevar_with_bound": 2, "typevar_with_constraints": 3, "set_function_type_params": 4, "set_typeparam_default": 5,
}  # fmt: skip


def one_operand(value: Any) -> Any:
    return -value


def two_operands(first: Any, second: Any) -> Any:
    return first + second


def patched(template: CodeType, replaced: str, intrinsic: str, number: int) -> CodeType:
    """The template's code with its one operator instruction replaced by a call of the intrinsic."""
    code = bytearray(template.co_code)
    at = next(ins.offset for ins in dis.get_instructions(template) if ins.opname == replaced)
    end = next(ins.offset for ins in dis.get_instructions(template) if ins.offset > at)
    code[at : at + 2] = bytes((dis.opmap[intrinsic], number))
    for cache in range(at + 2, end, 2):
        code[cache : cache + 2] = bytes((dis.opmap["NOP"], 0))
    return template.replace(co_code=bytes(code))


# Made once, here: the machine may not run Python of its own while it interprets somebody's.
CODES: dict[str, CodeType] = {}
if sys.version_info >= (3, 12):
    CODES |= {n: patched(one_operand.__code__, "UNARY_NEGATIVE", "CALL_INTRINSIC_1", i) for n, i in ONE.items()}
    CODES |= {n: patched(two_operands.__code__, "BINARY_OP", "CALL_INTRINSIC_2", i) for n, i in TWO.items()}


def run_intrinsic(domain: Any, frame: Any, name: str, first: Any, second: Any) -> Any:
    """Run a type-parameter intrinsic; its evaluation functions become interpreting ones."""
    if name == "subscript_generic":
        return subscript_generic(domain, first)
    if name in ONE:
        if name == "typealias":
            first = (first[0], first[1], lazy(domain, first[2]))
        return in_between(domain, frame, CODES[name])(first)
    if name != "set_function_type_params":
        second = lazy(domain, second)
    return in_between(domain, frame, CODES[name])(first, second)


def in_between(domain: Any, frame: Any, code: CodeType) -> Callable[..., Any]:
    """The native code as a function of the frame's module, which CPython asks for its __module__."""
    function = FunctionType(code, {"__name__": IN_BETWEEN, "__builtins__": frame.builtins})
    of_frame = frame.function if frame.function is not None else None
    function.__module__ = of_frame.__module__ if of_frame is not None else DICT_GET(frame.globals, "__name__", None)
    return lambda *args, **kwargs: domain.native(function, *args, **kwargs)


def call_within(callee: Any, *args: Any, **kwargs: Any) -> Any:
    return callee(*args, **kwargs)


def making_form(native: Any) -> None:
    """TypeVar and its kin, called: they take their __module__ from the calling function."""

    @form(native)
    def make(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        frame = domain.machine.frame
        if frame is None:
            return domain.native(native, *args, **kwargs)
        return in_between(domain, frame, call_within.__code__)(native, *args, **kwargs)


for kind in ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAliasType"):
    if sys.version_info >= (3, 12):
        making_form(getattr(typing, kind))


def lazy(domain: Any, function: Any) -> Any:
    evaluate = domain.machine.called_back(function)
    if evaluate is not function:
        evaluate.__module__ = function.__module__  # an alias takes its own from here
    return evaluate


def subscript_generic(domain: Any, params: Any) -> Any:
    """`Generic[params]`, a TypeVarTuple unpacked (Objects/typevarobject.c _Py_subscript_generic)."""
    unpacked = tuple(
        domain.next_item(domain.get_iter(param)) if isinstance(param, getattr(typing, "TypeVarTuple")) else param  # noqa: B009
        for param in params
    )
    return domain.get_item(typing.Generic, unpacked)
