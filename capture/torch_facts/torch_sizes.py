"""Expressions of symbolic sizes as nodes and as text: what this takes of torch's private names, in one place.

Checked on torch 2.13.0 (CPU with Python 3.11, CUDA with 3.12 and 3.13).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._sympy import functions
from torch.utils._sympy.interp import handlers, sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis


class PythonArithmetic(PythonReferenceAnalysis):
    """What torch's own leaves to sympy, which cannot be asked of nodes: Python's operators. Checked on torch 2.13."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def identity(x: Any) -> Any:
        return x

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return applied(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return applied(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return applied(math.trunc, x)

    @staticmethod
    def round_to_int(a: Any, dtype: Any) -> Any:
        return applied(round, a)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return applied(round, a, b)

    @staticmethod
    def floor(x: Any) -> Any:
        return applied(float, applied(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return applied(float, applied(math.ceil, x))


def applied(function: Callable[..., Any], x: Any, *rest: Any) -> Any:
    """``function(x, *rest)``, of a node as a node: fx's proxies have no part in Python's own roundings."""
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *rest), {})
    return function(x, *rest)


class Identity(functions.Identity):  # (sympy prints by this name)
    """A float of which sympy takes no part, until it is a number: torch's own stays, and compares with nothing."""

    @classmethod
    def eval(cls, value: Any) -> Any:
        return value if value.is_Number else None


handlers()[Identity] = "identity"  # what torch evaluates and prints it with


def rounded(value: Any) -> Any:
    """The value; a symbolic float that was computed as one that sympy takes no part of: ``n * 0.1 * 3`` is not
    ``n * 0.3``, as Python rounds in between."""
    if type(value) is not torch.SymFloat or not isinstance(value.node.expr, sympy.Add | sympy.Mul | sympy.Pow):
        return value
    node = value.node
    return torch.SymFloat(SymNode(Identity(node.expr), node.shape_env, float, node._hint))


def as_made(value: Any) -> Any:
    """The expression of a symbolic scalar, before the replacements known since."""
    return value.node._expr


def truncated(value: torch.SymFloat) -> Any:
    """``int(value)``."""
    return torch.sym_int(rounded(value))


def expression_to_node(expression: Any, symbol_node: Callable[[Any], Any], graph: Any) -> Any:
    """Write a sympy size expression as nodes of ``graph``. ``symbol_node`` gives the node of a symbol."""
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    symbols = sorted(expression.free_symbols, key=str)  # a set has another order in each process
    environment = {s: torch.fx.Proxy(symbol_node(s), tracer) for s in symbols}
    result = sympy_interp(PythonArithmetic, environment, expression)
    return result.node if isinstance(result, torch.fx.Proxy) else result


def expression_text(expression: Any, names: dict[Any, str]) -> str:
    """A sympy relation as Python text, symbols written as ``names`` says."""

    class Printer(PythonPrinter):
        def _print_Symbol(self, symbol: Any) -> str:
            return names[symbol]

        def _print_ToFloat(self, number: Any) -> str:  # (torch's own forms of these are for symbols)
            return f"float({self._print(number.args[0])})"

        def _print_Identity(self, value: Any) -> str:
            return f"({self._print(value.args[0])})"

        def _helper_sqrt(self, number: Any) -> str:
            return f"math.sqrt({self._print(number)})"

    return Printer().doprint(expression)


def asked_by(error: Exception) -> str:
    """What an operator asks of its tensors' sizes, where that is its error; else ""."""
    return of_symbols(error.cond, error.cond.free_symbols) if isinstance(error, GuardOnDataDependentSymNode) else ""


def in_words(value: Any) -> str:
    """A symbolic scalar that depends on values, for people: ``n >= 3, where n is a size that …``."""
    return of_symbols(value.node.expr, getattr(value.node.shape_env, "size_like", ()))


def of_symbols(asked: Any, sizes: Collection[Any]) -> str:
    symbols = sorted(asked.free_symbols, key=str)
    names = dict(zip(symbols, itertools.chain("nmk", (f"n{i}" for i in range(len(symbols)))), strict=False))
    kind = "size" if all(symbol in sizes for symbol in symbols) else "number"
    said = " and ".join(names.values()) + (f" is a {kind}" if len(symbols) == 1 else f" are {kind}s")
    return f"{expression_text(asked, names)}, where {said} that only the running step knows"


OURS = re.compile(r"<moebius\.[\w.]+ object at 0x[0-9a-f]+>")
OPERATOR = re.compile(r"\baten\.(\w+)(?:\.\w+)?\b")


def told(text: str, symbols: Iterable[Any]) -> str:
    """A text, of an error or a break, with what a user knows in the place of names of torch's machinery and ours.

    symbols: of the trace's sizes and numbers."""
    names = "|".join(sorted(map(str, symbols), key=len, reverse=True))
    text = re.sub(rf"\b(?:{names})\b", "n", text) if names else text
    return OPERATOR.sub(r"\1", OURS.sub("a value of the step", text)).replace("FakeTensor", "Tensor")


def limits(asked: Any, truth: bool) -> Iterator[tuple[Any, Any, Any, Any]]:
    """What a condition on integers that has this truth says of single symbols: (symbol, at least, at most, which number
    it is not), each of them None where it says nothing."""
    relation = asked.node.expr if type(asked) is torch.SymBool else sympy.Ne(asked.node.expr, 0)
    for part in sympy.And.make_args(relation if truth else sympy.Not(relation)):
        if isinstance(part, sympy.Eq | sympy.Ne):
            apart, strict = part.lhs - part.rhs, 0
        elif isinstance(part, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
            apart, strict = part.gts - part.lts, int(isinstance(part, sympy.Lt | sympy.Gt))
        else:
            continue
        if len(apart.free_symbols) != 1 or not (symbol := next(iter(apart.free_symbols))).is_integer:
            continue
        times, rest = apart.coeff(symbol), sympy.expand(apart - apart.coeff(symbol) * symbol)
        if times in (1, -1) and rest.is_Integer:
            limit, equal = (strict - rest) * times, isinstance(part, sympy.Eq)
            if isinstance(part, sympy.Ne):
                yield symbol, None, None, limit
            else:
                yield symbol, limit if equal or times == 1 else None, limit if equal or times == -1 else None, None


CALLED = {"min": min, "max": max, "abs": abs, "int": int, "float": float, "round": round}  # what a text may call
IMPORT = {"__import__": __import__}  # where a relation warns (torch.jit.trace asks sizes for their truth)


def compiled(text: str, names: Sequence[str]) -> Callable[..., Any]:
    """The function of these names that a text of ``expression_text`` gives."""
    function = eval(f"lambda {', '.join(names)}: {text}", {"math": math, "__builtins__": CALLED | IMPORT})
    function.text = text
    return function
