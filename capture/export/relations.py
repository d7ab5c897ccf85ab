"""What must hold of numbers: relations of sizes, and what a step computes of its numbers, as trees.

They are evaluated by walking them, and never handed to Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ExportError
from .archive import each, index, need
from .operators import functions, names
from .values import decode, encode

MAX_BITS = 1 << 12  # of what a power, a shift or a binomial gives
OPERATORS: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.USub: "neg", ast.Not: "not_", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le",
    ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
Evaluate = Callable[[Sequence[Any]], Any]


def write_relation(tree: ast.expr) -> Any:
    """The JSON of a relation of sizes, ``(t0.shape[0] >= 2) and (t1 == t0.shape[0])``, over the objects t0, t1, …."""
    match tree:
        case ast.BoolOp(op=op, values=values):
            return {"all" if isinstance(op, ast.And) else "any": list(map(write_relation, values))}
        case ast.Compare(left=left, ops=ops, comparators=others) if OPERATORS.keys() >= set(map(type, ops)):
            terms = list(map(write_relation, (left, *others)))
            return {"all": [call(op, a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False)]}
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return call(op, write_relation(left), write_relation(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return call(op, write_relation(operand))
        case ast.Constant(value=value):
            return encode(value)
        case ast.Name(id=name):
            return {"number": int(name[1:])}
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=axis)):
            return {"shape": [int(name[1:]), axis]}
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="stride"), args=[ast.Constant(value=axis)]):
            return {"stride": [int(name[1:]), axis]}
        case ast.Call(func=function, args=args):
            name = ast.unparse(function)
            return {"call": [name if "." in name else f"builtins.{name}", *map(write_relation, args)]}
    raise ExportError(f"no file can hold the relation {ast.unparse(tree)!r:.60} of sizes")


def call(operator: ast.operator | ast.unaryop | ast.cmpop, *operands: Any) -> Any:
    return {"call": [f"operator.{OPERATORS[type(operator)]}", *operands]}


def write_number(formula: Any, sources: Sequence[Any]) -> Any:
    """The JSON of a ``Formula`` (values.formulas) over the numbers at ``sources``."""
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
    """Either as a function of the objects. Raises LoadError."""
    need(depth < 200, "numbers are nested too deeply")
    kind, content = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "number":
        position = index(content, count, "a number of a guard")
        return lambda t: t[position]
    if kind in ("shape", "stride"):
        place = each(content, "a size", lambda n: index(n, 1 << 12, "a place of a size"))
        need(len(place) == 2 and place[0] < count, "a size")
        return lambda t: getattr(t[place[0]], "size" if kind == "shape" else kind)(place[1])
    if kind in ("all", "any"):
        parts = each(content, "conditions", lambda v: read_number(v, count, depth + 1))
        return lambda t: (all if kind == "all" else any)(part(t) for part in parts)
    if kind == "call":
        parts = each(content, "a computation", lambda v: v)
        need(parts and type(parts[0]) is str, "a computation has no name")
        name = parts[0]
        known = name.startswith(("operator.", "math.", "builtins.")) and functions().get(name)
        need(known, f"{name!r:.40} cannot be computed in a guard")
        assert callable(known)
        function = bounded(known) if name.endswith(("pow", "shift", "comb")) else known
        operands = [read_number(v, count, depth + 1) for v in parts[1:]]
        return lambda t: function(*(o(t) for o in operands))
    constant = decode(value)
    return lambda t: constant


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A power, a shift or a binomial, which a file may not make as large as it likes."""

    def computed(number: Any, by: Any) -> Any:
        if type(number) is type(by) is int and by * (number.bit_length() + 1) > MAX_BITS:
            raise OverflowError("too large a number")
        return function(number, by)

    return computed
