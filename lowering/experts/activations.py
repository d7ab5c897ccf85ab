"""Which activation a row function is. The table spells each as torch code; the rules read both sides into one normal
form.

An activation is matched up to a constant factor, which goes to the routing weight: down(c · a) = c · down(a).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from moebius.lowering.experts.facts import (
    Constant,
    Fact,
    Invariant,
    Linear,
    Pointwise,
    Product,
    RowFunction,
    Rows,
    Selection,
    Slice,
    as_product,
)
from moebius.lowering.experts.reader import RULES
from moebius.lowering.operators import read_call

# name in moebius.kernels.ACTIVATIONS -> ways to write it
SPELLINGS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "silu": (functional.silu, lambda h: h * torch.sigmoid(h)),
    "gelu": (functional.gelu, lambda h: h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))),
    "gelu_tanh": (
        lambda h: functional.gelu(h, approximate="tanh"),
        lambda h: 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0)))),
        lambda h: 0.5 * h * (1.0 + torch.tanh(h * 0.7978845608 * (1.0 + 0.044715 * h * h))),
    ),
    # not clamp(h, min=0): its derivative at 0 is 1, and rows of zeros (padding) do meet 0
    "relu": (functional.relu,),
    "relu2": (lambda h: torch.square(functional.relu(h)), lambda h: torch.pow(functional.relu(h), 2)),
    "sigmoid": (torch.sigmoid,),
    "identity": (lambda h: h,),
}

Form = Any  # nested tuples


def normal_form(fact: Fact, leaf: Fact) -> Form:
    """A row function of ``leaf`` as nested tuples: sums and products sorted, powers written out, numbers rounded."""
    if fact == leaf:
        return "h"
    match fact:
        case Constant(value=bool() | None):
            return fact.value
        case Constant():
            return rounded(fact.value)
        case Product() if not fact.weights:
            parts = [normal_form(factor, leaf) for factor in fact.factors]
            return product_form(fact.coefficient, parts)
        case Pointwise():
            parts = [normal_form(argument, leaf) for argument in fact.arguments]
            if fact.operator == "square":
                return product_form(1.0, [parts[0], parts[0]])
            if fact.operator == "pow" and parts[1] in (2.0, 3.0):
                return product_form(1.0, [parts[0]] * int(parts[1]))
            if fact.operator == "add" and ("alpha", 1) in fact.parameters:
                return ("add", *sorted(parts, key=repr))
            parameters = tuple(
                (name, rounded(v) if isinstance(v, int | float) and not isinstance(v, bool) else v)
                for name, v in fact.parameters
                if v is not None and name != "inplace"
            )
            return (fact.operator, *parts, *parameters)
    return ("?", repr(fact))


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


class Pattern:
    """Stands in for a Reader: one float32 matrix, everything else a constant."""

    def __init__(self, graph: fx.Graph, leaf: Linear):
        self.facts: dict[fx.Node, Fact] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.facts[node] = leaf
            elif node.op == "output":
                self.result = self.fact(node.args[0])
            else:
                call = read_call(node)
                assert call is not None, f"{node.target} is not in the operator tables"
                found = (candidate(self, call) for candidate in RULES[call.name])  # type: ignore[arg-type]
                self.facts[node] = next(fact for fact in found if fact is not None)

    def fact(self, argument: Any) -> Fact:
        return self.facts[argument] if isinstance(argument, fx.Node) else Constant(argument)

    def dtype(self, argument: Any) -> torch.dtype:
        return torch.float32

    def shape(self, argument: Any) -> tuple[int, int]:
        return (3, 5)

    def rank(self, argument: Any) -> int:
        return 2


def of_one(spelling: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of one named argument, which is what fx can trace."""

    def function(h: Any) -> Any:
        return spelling(h)

    return function


@cache
def table() -> dict[Form, tuple[str, float]]:
    """normal form without its coefficient -> (name, coefficient)."""
    index = Invariant("index", None)  # type: ignore[arg-type]
    selection = Selection(index, (0, 1), None)
    weight = Slice(Invariant("w", None), (1, 2), (range(5), range(5)), torch.float32)  # type: ignore[arg-type]
    leaf = Linear(selection, torch.float32, Rows(selection, torch.float32, index, 0), weight, 1)
    found: dict[Form, tuple[str, float]] = {}
    for name, spellings in SPELLINGS.items():
        for spelling in spellings:
            graph = fx.Tracer().trace(of_one(spelling))
            coefficient, form = split_coefficient(normal_form(Pattern(graph, leaf).result, leaf))
            found[form] = (name, coefficient)
    return found


def match_activation(factors: tuple[RowFunction, ...], leaf: Linear) -> tuple[str, float] | None:
    """(name, c) with Π factors = c · activation(leaf), or None."""
    first = as_product(factors[0])
    product = Product(first.selection, first.dtype, 1.0, factors, ())
    coefficient, form = split_coefficient(normal_form(product, leaf))
    known = table().get(form)
    return None if known is None else (known[0], coefficient / known[1])
