"""Python numbers that only the running step knows: what ``loss.item()`` gives, a learning rate that a scheduler sets.

A ``Number`` is a node of the graph whose value at run time is a Python number. Arithmetic on it is written down as the
same arithmetic on Python numbers, operation by operation, so that the result is Python's to the last bit (a symbolic
algebra would reorder float operations). For fakes a representative stands in: no operator's shape or dtype depends on
the value of a float, and operators where it does are refused.

A number that comes from the call's inputs alone has a value today, so a branch on it can be guarded; one that comes
from a tensor has none, and a branch on it is a graph break.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.interpreter.domain.operators import COMPARISONS, UNARIES
from moebius.interpreter.domain.operators import OPERATIONS as OPERATORS
from moebius.lowering.step import draw, draw_array, draw_below, draw_numpy

from ..guards.sources import Source
from .formulas import AtSource, Formula
from .numpy_numbers import NUMPY_NUMBERS
from .values import OWN, Break, RuntimeNumber

PLAIN_NUMBERS = (int, float, bool)
NUMBERS = (*PLAIN_NUMBERS, complex)
# Clocks that give seconds.
CLOCKS = (time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time)
READINGS = frozenset((*CLOCKS, draw, draw_array, draw_below, draw_numpy))  # another answer each time

class Arithmetic(Protocol):
    """What writes down what is done with numbers (``tensors.numbers.Numbers``)."""

    fixed: dict[int, Number]

    def apply(self, function: Callable[..., Any], *operands: Any, method: str = "", **named: Any) -> Any: ...

    def as_size(self, number: Number) -> Any: ...

    def constant(self, number: Number) -> Any: ...

    def open(self, operand: Any) -> Any: ...


class Number(RuntimeNumber):
    """A Python number at run time, a node of the graph while tracing.

    node: None for a number that is known but not computed by the graph (the answer of a look-up): it can be branched
    on, and becomes a constant where it is used.
    representative: a number of its type, today's value where ``evaluate`` is set.
    evaluate: computes it from the values at ``sources``, where it comes from the call's inputs alone.
    goes_both_ways: whether a branch on it is to have both of its sides in the graph.
    """

    __slots__ = (
        "__weakref__", "evaluate", "goes_both_ways", "node", "numbers", "representative", "size", "source", "sources",
    )  # fmt: skip

    def __init__(
        self,
        numbers: Arithmetic,
        representative: Any,
        node: fx.Node | None,
        sources: tuple[Source, ...] | None = None,
        evaluate: AtSource | Formula | None = None,
    ):
        self.numbers, self.representative, self.node = numbers, representative, node
        self.sources, self.evaluate = sources, evaluate
        self.goes_both_ways = False
        self.source: Source | None = None  # of an input itself
        self.size: Any = None  # the symbolic size that it is where one is wanted

    @property
    def kind(self) -> type:
        """``type(value)``."""
        return type(self.representative)

    @property
    def known(self) -> bool:
        """Whether the representative is the value that this call has."""
        return self.evaluate is not None

    def settled(self) -> Any:
        """For an operator's argument: floats stay open, and so do ints, which may be sizes."""
        return self if self.kind in (float, complex) and self.node is not None else self.numbers.as_size(self)

    def refuse(self, *_: Any) -> NoReturn:
        kind = "an int" if self.kind is int else f"a {self.kind.__name__}"
        if self.known:  # it comes from the call's inputs alone
            met = f"Python needs the value of {kind} that is another one in each call"
            raise Break("value that varies from call to call", met, "make it a tensor, or keep it out of the step")
        raise Break(
            "tensor read as a number",
            f"Python needs the value of {kind} that the graph computes",
            "keep it in arithmetic, or read it at the end of the step",
        )

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = __eq__ = __ne__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __str__ = __format__ = refuse
    __hash__ = object.__hash__


Number.__name__ = f"{OWN}number"


def is_open(operand: Any) -> bool:
    """Whether an operand is a number or size that only the running step knows, or a list with one."""
    if type(operand) in (list, tuple):
        return any(map(is_open, operand))
    return type(operand) is Number or type(operand) in (torch.SymInt, torch.SymFloat)


def number_kind(value: Any) -> type:
    """The type of a value, of a number that only the running step knows the type that it will have."""
    return value.kind if issubclass(type(value), Number) else type(value)


def numpy_numbers_in(operand: Any) -> bool:
    """Whether an operand is a number of numpy's, or a list with one."""
    if type(operand) in (list, tuple):
        return any(map(numpy_numbers_in, operand))
    return number_kind(operand) in NUMPY_NUMBERS


EXAMPLES: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 0.5, torch.SymBool: True}


def example(value: Any) -> Any:
    """A number of the same type, of which Python says at once what cannot be done with such a number."""
    return value.representative if is_kind(value, Number) else EXAMPLES.get(type(value), value)


# Of numbers alone: the graph has no matrices of Python's, nor does a number change in place.
OPERATIONS = COMPARISONS | {op: function for op, function in OPERATORS.items() if op != "@" and op[-1] != "="}
UNARY = {op: function for op, (function, _) in UNARIES.items()}
