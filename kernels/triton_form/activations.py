"""Gates written out as Triton source, in float32, from the expressions that the other forms evaluate."""
from __future__ import annotations

import linecache
from functools import cache
from typing import Any

import triton
import triton.language as tl

from moebius.kernels.activations import expression_of
from moebius.kernels.expressions import Expr, in_order


def write(each: Expr, x: list[str]) -> str:
    """One node as Triton source; x: its arguments. NaN stays NaN, and derivatives at kinks are torch's."""
    low, high = each.bounds
    match each.op:
        case "const":
            return f"{each.number!r}"
        case "add" | "sub" | "mul" | "div":
            return f"{x[0]} {dict(add='+', sub='-', mul='*', div='/')[each.op]} {x[1]}"
        case "neg":
            return f"-{x[0]}"
        case "sigmoid" | "exp" | "erf" | "abs" | "sqrt" | "rsqrt" | "log" | "sin" | "cos":
            return f"tl.{each.op}({x[0]})"
        case "tanh":
            return f"2.0 * tl.sigmoid(2.0 * {x[0]}) - 1.0"
        case "log1p":
            return f"tl.log(1.0 + {x[0]})"
        case "expm1":
            return f"tl.exp({x[0]}) - 1.0"
        case "sign":
            return f"tl.where({x[0]} > 0.0, 1.0, tl.where({x[0]} < 0.0, -1.0, 0.0))"
        case "gt" | "ge" | "lt" | "le":
            return f"{x[0]} {dict(gt='>', ge='>=', lt='<', le='<=')[each.op]} {x[1]}"
        case "where":
            return f"tl.where({x[0]}, {x[1]}, {x[2]})"
        case "square":
            return f"{x[0]} * {x[0]}"
        case "relu":
            return f"tl.where({x[0]} < 0.0, 0.0, {x[0]})"
        case "positive":
            return f"tl.where({x[0]} <= 0.0, 0.0, 1.0)"
        case "clamp" | "hardtanh":
            inner = x[0] if low is None else f"tl.where({x[0]} < {low!r}, {low!r}, {x[0]})"
            return inner if high is None else f"tl.where({x[0]} > {high!r}, {high!r}, {inner})"
        case "inside":
            tests = [f"({x[0]} == {x[0]})"]
            tests += [] if low is None else [f"({x[0]} >= {low!r})"]
            tests += [] if high is None else [f"({x[0]} <= {high!r})"]
            return f"tl.where({' & '.join(tests)}, 1.0, 0.0)"
        case "within":
            tests = [] if low is None else [f"({x[0]} <= {low!r})"]
            tests += [] if high is None else [f"({x[0]} >= {high!r})"]
            return f"tl.where({' | '.join(tests)}, 0.0, 1.0)" if tests else "1.0"
    raise AssertionError(each.op)


def function_source(name: str, roots: list[Expr]) -> str:
    """A function of (g, u) that returns the roots."""
    names: dict[Expr, str] = {}
    lines = ["@triton.jit", f"def {name}(g, u):"]
    for number, each in enumerate(in_order(roots)):
        if each.op in ("g", "u"):
            names[each] = each.op
            continue
        names[each] = f"v{number}"
        lines.append(f"    v{number} = {write(each, [names[argument] for argument in each.arguments])}")
    # a derivative may be a number: made a tensor like g
    results = [names[root] if depends(root) else f"tl.zeros_like(g) + {names[root]}" for root in roots]
    return "\n".join([*lines, f"    return {', '.join(results)}"])


def depends(root: Expr) -> bool:
    """Whether an expression has a letter in it."""
    return any(each.op in ("g", "u") for each in in_order([root]))


@cache
def gate_functions(activation: str, gate: str) -> tuple[Any, Any]:
    """(value, gradients), both jitted, of (g, u): A, and (A, dA/dg, dA/du). Without an up half u is ignored and dA/du
    is dA/dg again."""
    gating = expression_of(activation, gate)
    d_up = gating.d_gate if gating.d_up is None else gating.d_up
    text = "\n\n\n".join([
        f"# {activation!r}, gate {gate}",
        function_source("gate_value", [gating.value]),
        function_source("gate_gradients", [gating.value, gating.d_gate, d_up]),
    ]) + "\n"
    # Triton reads a function's source through linecache; an entry without a time stamp is kept there.
    filename = f"<moebius gate {activation} {gate}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(text, filename, "exec"), namespace)
    return namespace["gate_value"], namespace["gate_gradients"]
