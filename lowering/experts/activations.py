"""Which named activation a row function is. Both are texts of the operator's language (expressions.py), read into its
expressions, in which named ones are written out, and brought into one normal form.

An activation is matched up to a constant factor, which goes to the routing weight: down(c · a) = c · down(a).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from moebius.kernels.errors import ExpertsInputError
from moebius.kernels.expressions import Expr, parse
from moebius.lowering.experts.expressions import NotSaid, say
from moebius.lowering.experts.facts import Linear, RowFunction

# Names in moebius.kernels.ACTIVATIONS, and what else they are written as. (relu is not clamp(g, 0, None): that has 1
# for a derivative at 0, and rows of zeros, padding, do meet 0.)
NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")
OTHERWISE = {"gelu_tanh": "0.5 * g * (1.0 + tanh(g * 0.7978845608 * (1.0 + 0.044715 * g * g)))"}

Form = Any  # nested tuples


def normal_form(expression: Expr) -> Form:
    """Sums and products sorted, powers written out, numbers rounded."""
    if expression.op in ("g", "const"):
        return "g" if expression.op == "g" else rounded(expression.number)
    parts = [normal_form(argument) for argument in expression.arguments]
    match expression.op:
        case "mul" | "neg":
            return product_form(1.0 if expression.op == "mul" else -1.0, parts)
        case "square":
            return product_form(1.0, parts * 2)
        case "div" if isinstance(parts[1], float) and parts[1] != 0:
            return product_form(1.0 / expression.arguments[1].number, parts[:1])
        case "add":
            return ("add", *sorted(parts, key=repr))
    return (expression.op, *parts, expression.bounds)


def product_form(coefficient: float, parts: list[Form]) -> Form:
    flat: list[Form] = []
    for part in parts:
        if isinstance(part, tuple) and part and part[0] == "product":
            coefficient *= part[1]
            flat.extend(part[2:])
        elif isinstance(part, float):
            coefficient *= part
        else:
            flat.append(part)
    if len(flat) == 1 and coefficient == 1.0:
        return flat[0]
    return ("product", rounded(coefficient), *sorted(flat, key=repr))


def rounded(number: float) -> float:
    return float(f"{float(number):.8g}")


def split_coefficient(form: Form) -> tuple[float, Form]:
    """(c, f) with form = c · f."""
    if isinstance(form, tuple) and form and form[0] == "product":
        rest = form[2:]
        return form[1], rest[0] if len(rest) == 1 else ("product", 1.0, *rest)
    return 1.0, form


@cache
def table() -> dict[Form, tuple[str, float]]:
    """normal form without its coefficient -> (name, coefficient)."""
    found: dict[Form, tuple[str, float]] = {}
    for name, text in [*((name, f"{name}(g)") for name in NAMES), *OTHERWISE.items()]:
        coefficient, form = split_coefficient(normal_form(parse(text)))
        found[form] = (name, coefficient)
    return found


def match_activation(factors: tuple[RowFunction, ...], leaf: Linear) -> tuple[str, float] | None:
    """(name, c) with Π factors = c · activation(leaf), or None."""
    try:
        coefficient, form = split_coefficient(normal_form(parse(say(factors, leaf, None))))
    except (NotSaid, ExpertsInputError):
        return None
    known = table().get(form)
    return None if known is None else (known[0], coefficient / known[1])
