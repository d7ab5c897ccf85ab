"""Any other gate than the named activations: a row function of one or two projections, written out as the text that the
experts operator reads (moebius.kernels.expressions). The text says the same operations in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from moebius.lowering.experts.facts import Constant, Fact, Linear, Pointwise, Product, RowFunction

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
SAME_NAME = frozenset(
    {"sigmoid", "tanh", "exp", "erf", "relu", "square", "silu", "abs", "sqrt", "rsqrt", "log", "log1p", "expm1", "sin",
     "cos"}
)  # fmt: skip
COMPARED = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717  # torch's
LARGE = 40.0  # log(1 + exp(x)) is x from here on, in float64 too


def soft(x: str, beta: float = 1.0, threshold: float = LARGE) -> str:
    """softplus, whose exponential does not overflow where it is not taken."""
    t = f"({beta!r} * {x})"
    return f"where({t} > {threshold!r}, {x}, log1p(exp(clamp({t}, None, {threshold!r}))) / {beta!r})"


def exponential(x: str, alpha: float) -> str:
    return f"{alpha!r} * expm1(clamp({x}, None, 0.0))"


# Functions of torch that the language has no word for, by the names of their parameters: the value, and the derivative
# at each kink, are torch's. x is in parentheses.
WRITTEN: dict[str, Callable[..., str]] = {
    "leaky_relu": lambda x, negative_slope: f"relu{x} + {negative_slope!r} * clamp({x}, None, 0.0)",
    "elu": lambda x, alpha: f"relu{x} + {exponential(x, alpha)}",
    "selu": lambda x: f"{SELU_SCALE!r} * (relu{x} + {exponential(x, SELU_ALPHA)})",
    "celu": lambda x, alpha: f"relu{x} + {exponential(f'({x} / {alpha!r})', alpha)}",
    "relu6": lambda x: f"hardtanh({x}, 0.0, 6.0)",
    "hardtanh": lambda x, min_val, max_val: f"hardtanh({x}, {min_val!r}, {max_val!r})",
    "hardsigmoid": lambda x: f"hardtanh({x} + 3.0, 0.0, 6.0) / 6.0",
    "hardswish": lambda x: f"{x} * hardtanh({x} + 3.0, 0.0, 6.0) / 6.0",
    "mish": lambda x: f"{x} * tanh({soft(x)})",
    "softplus": lambda x, beta, threshold: soft(x, beta, threshold),
    "logsigmoid": lambda x: f"-({soft(f'(-{x})')})",
    "softsign": lambda x: f"{x} / (1.0 + abs{x})",
    "tanhshrink": lambda x: f"{x} - tanh{x}",
    "softshrink": lambda x, lambd: f"{x} - clamp({x}, {-lambd!r}, {lambd!r})",
    "hardshrink": lambda x, lambd: f"where(abs{x} <= {lambd!r}, 0.0, {x})",
    "threshold": lambda x, threshold, value: f"where({x} <= {threshold!r}, {value!r}, {x})",
}


class NotSaid(Exception):
    """The operator's language has no word for a part of the row function. The text names the part."""


def letters_of(leaves: list[Linear]) -> tuple[Linear, Linear | None]:
    """(g, u): of two parts of one weight the earlier one is g, so that halves keep their layout."""
    if len(leaves) == 1:
        return leaves[0], None
    first, second = sorted(leaves, key=lambda leaf: (repr(leaf.weight.weight), part_start(leaf)))
    return first, second


def part_start(leaf: Linear) -> int:
    part = leaf.weight.range_of(leaf.out_axis)
    return part.start if len(part) else 0


def say(factors: tuple[RowFunction, ...], gate: Linear, up: Linear | None) -> str:
    """The product of the factors as an expression of g and u. Raises NotSaid."""
    return " * ".join(f"({text(factor, gate, up)})" for factor in factors)


def text(fact: Fact, gate: Linear, up: Linear | None) -> str:
    if fact == gate:
        return "g"
    if up is not None and fact == up:
        return "u"
    match fact:
        case Constant(value=int() | float()) if not isinstance(fact.value, bool) and math.isfinite(fact.value):
            return repr(float(fact.value))
        case Product() if not fact.weights:
            scale = [] if fact.coefficient == 1.0 else [repr(float(fact.coefficient))]
            return " * ".join([*scale, *(f"({text(factor, gate, up)})" for factor in fact.factors)])
        case Pointwise():
            return pointwise(fact, gate, up)
    raise NotSaid(type(fact).__name__)


def pointwise(fact: Pointwise, gate: Linear, up: Linear | None) -> str:
    name, given = fact.operator, dict(fact.parameters)
    if name == "where":
        return choice(fact, gate, up)
    parts = [f"({text(argument, gate, up)})" for argument in fact.arguments]
    plain = {key for key, value in given.items() if value is not None and key != "inplace"}
    if name in ARITHMETIC and len(parts) == 2 and plain <= {"alpha"} and given.get("alpha", 1) == 1:
        return f"{parts[0]} {ARITHMETIC[name]} {parts[1]}"
    if name in SAME_NAME and len(parts) == 1 and not plain:
        return f"{name}{parts[0]}"
    if name == "neg" and not plain:
        return f"-{parts[0]}"
    if name == "pow" and not plain and isinstance(fact.arguments[1], Constant) and fact.arguments[1].value == 2:
        return f"square{parts[0]}"
    if name == "gelu" and plain <= {"approximate"}:
        kinds = {"none": "gelu", "tanh": "gelu_tanh"}
        kind = kinds.get(given.get("approximate") or "none")
        if kind is not None:
            return f"{kind}{parts[0]}"
    if name == "clamp" and len(parts) == 1 and plain <= {"min", "max"}:
        low, high = given.get("min"), given.get("max")
        # infinite bounds (a limit that is switched off) are none; only a NaN has another derivative there, 0 in eager
        low = None if low == -math.inf else low
        high = None if high == math.inf else high
        return parts[0] if low is None and high is None else f"clamp({parts[0]}, {bound(low)}, {bound(high)})"
    inexact = name == "hardsigmoid" or (name == "celu" and given["alpha"] != 1)
    if inexact and fact.dtype is torch.float64:  # torch has 1/6, and 1/alpha, in float32 in their derivatives
        raise NotSaid(f"{name} in float64")
    if name in WRITTEN and len(parts) == 1:
        return written(name, parts[0], {key: value for key, value in given.items() if key != "inplace"})
    if name == "pow" and not plain and isinstance(fact.arguments[1], Constant):
        return power(parts[0], fact.arguments[1].value)
    raise NotSaid(name)


def choice(fact: Pointwise, gate: Linear, up: Linear | None) -> str:
    """``where(x > y, a, b)``."""
    condition, *branches = fact.arguments
    if not isinstance(condition, Pointwise) or condition.operator not in COMPARED:
        raise NotSaid("where, on something else than a comparison,")
    left, right, a, b = (f"({text(part, gate, up)})" for part in (*condition.arguments, *branches))
    return f"where({left} {COMPARED[condition.operator]} {right}, {a}, {b})"


def written(name: str, x: str, given: dict[str, object]) -> str:
    """A function of WRITTEN."""
    numbers: dict[str, float] = {}
    for key, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise NotSaid(f"{name} with {key}={value}")
        numbers[key] = float(value)
    if name in ("celu", "softplus", "softshrink") and min(numbers.values()) <= 0:
        raise NotSaid(f"{name} by a number that is not positive")
    return WRITTEN[name](x, **numbers)


def power(x: str, exponent: object) -> str:
    """x to a small whole number, as products; its square root."""
    if exponent == 0.5:
        return f"sqrt{x}"
    if isinstance(exponent, int | float) and not isinstance(exponent, bool) and exponent in (3, 4):
        return f"{x} * square{x}" if exponent == 3 else f"square(square{x})"
    raise NotSaid(f"pow by {exponent}")


def bound(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(float(value))
    raise NotSaid(f"clamp by {value}")
