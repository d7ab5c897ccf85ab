"""What must hold of numbers: relations of sizes as text, and what a step computes of its numbers as a tree.

Both are evaluated by walking them; neither is ever handed to Python.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ExportError
from .archive import each, index, need
from .operators import functions, names
from .values import decode, encode

MAX_TEXT = 1 << 16
MAX_TERMS = 1 << 12
MAX_POWER = 64  # of a constant exponent: sizes are never raised to more
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
CALLS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}
Evaluate = Callable[[Sequence[Any]], Any]


def size_relation(text: Any, count: int) -> Evaluate:
    """``(t0.shape[0] >= 2) and (t1 == t0.shape[0])`` as a function of the objects t0, t1, …. Raises LoadError."""
    need(type(text) is str and len(text) <= MAX_TEXT, "a relation of sizes is no short text")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    need(tree is not None, f"{text!r:.60} is no relation of sizes")
    assert tree is not None
    need(sum(1 for _ in ast.walk(tree)) <= MAX_TERMS, "a relation of sizes has too many terms")
    return relation(tree.body, count)


def relation(tree: ast.expr, count: int) -> Evaluate:
    match tree:
        case ast.BoolOp(op=op, values=values):
            parts = [relation(v, count) for v in values]
            every = isinstance(op, ast.And)
            return lambda t: all(p(t) for p in parts) if every else any(p(t) for p in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(o) in COMPARE for o in ops):
            terms = [relation(v, count) for v in (left, *others)]
            tests = [COMPARE[type(o)] for o in ops]

            def chain(t: Sequence[Any]) -> bool:
                values = [term(t) for term in terms]
                return all(test(a, b) for test, a, b in zip(tests, values, values[1:], strict=False))

            return chain
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            if isinstance(op, ast.Pow):
                small = isinstance(right, ast.Constant) and type(right.value) is int and 0 <= right.value <= MAX_POWER
                need(small, "a power in a relation of sizes")
            first, second, function = relation(left, count), relation(right, count), BINARY[type(op)]
            return lambda t: function(first(t), second(t))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            inner, change = relation(operand, count), UNARY[type(op)]
            return lambda t: change(inner(t))
        case ast.Constant(value=bool() | int() | float() as number):
            return lambda t: number
        case ast.Name(id=name):
            return place(name, count)
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int() as axis)
        ):
            tensor = place(name, count)
            return lambda t: tensor(t).shape[axis]
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="stride"),
            args=[ast.Constant(value=int() as axis)],
            keywords=[],
        ):
            tensor = place(name, count)
            return lambda t: tensor(t).stride(axis)
        case ast.Call(func=func, args=args, keywords=[]) if ast.unparse(func) in CALLS:
            called, operands = CALLS[ast.unparse(func)], [relation(a, count) for a in args]
            return lambda t: called(*(o(t) for o in operands))
    need(False, f"{ast.unparse(tree)[:60]!r} cannot be in a relation of sizes")
    raise AssertionError


def place(name: str, count: int) -> Evaluate:
    need(name[:1] == "t" and name[1:].isdecimal() and len(name) < 6, f"the name {name!r:.40} in a relation of sizes")
    position = index(int(name[1:]), count, "an object of a relation")
    return lambda t: t[position]


# ----------------------------------------------------------------------------------------------------------------------
# Trees of numbers
# ----------------------------------------------------------------------------------------------------------------------


def write_number(formula: Any, sources: Sequence[Any]) -> Any:
    """The JSON of a ``Formula`` (tracking.formulas) over the numbers at ``sources``."""
    if hasattr(formula, "operands"):
        name = names().get(formula.function)
        if name is None or formula.named or not name.startswith(("operator.", "math.", "builtins.")):
            function = getattr(formula.function, "__qualname__", formula.function)
            raise ExportError(f"the step depends on what {function} gives for a number, and no file can name that")
        return {"call": [name, *(write_number(o, sources) for o in formula.operands)]}
    if hasattr(formula, "source"):
        return {"number": list(sources).index(formula.source)}
    return encode(formula)


def read_number(value: Any, count: int, depth: int = 0) -> Evaluate:
    """The same as a function of the numbers. Raises LoadError."""
    need(depth < 200, "numbers are nested too deeply")
    if isinstance(value, dict) and set(value) == {"number"}:
        position = index(value["number"], count, "a number of a guard")
        return lambda t: t[position]
    if isinstance(value, dict) and set(value) == {"call"}:
        parts = each(value["call"], "a computation", lambda v: v)
        need(parts and type(parts[0]) is str, "a computation has no name")
        name = parts[0]
        known = name.startswith(("operator.", "math.", "builtins.")) and functions().get(name)
        need(known, f"{name!r:.40} cannot be computed in a guard")
        operands = [read_number(v, count, depth + 1) for v in parts[1:]]
        assert callable(known)
        return lambda t: known(*(o(t) for o in operands))
    constant = decode(value)
    return lambda t: constant
