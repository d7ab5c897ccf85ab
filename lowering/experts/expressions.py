"""Any other gate than the named activations: a row function of one or two projections, written out as the text that the
experts operator reads (moebius.kernels.expressions). The text says the same operations in the same order."""

from __future__ import annotations

import math

from moebius.lowering.experts.facts import Constant, Fact, Linear, Pointwise, Product, RowFunction

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
SAME_NAME = frozenset({"sigmoid", "tanh", "exp", "erf", "relu", "square", "silu"})


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
    raise NotSaid(name)


def bound(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(float(value))
    raise NotSaid(f"clamp by {value}")
