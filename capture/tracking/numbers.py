"""Python numbers that only the running step knows: what ``loss.item()`` gives, a learning rate that a scheduler sets.

A ``Number`` is a node of the graph whose value at run time is a Python number. Arithmetic on it is written down as the
same arithmetic on Python numbers, operation by operation, so that the result is Python's to the last bit (a symbolic
algebra would reorder float operations). For fakes a representative stands in: no operator's shape or dtype depends on
the value of a float, and operators where it does are refused.

A number that comes from the call's inputs alone has a value today, so a branch on it can be guarded; one that comes
from a tensor has none, and a branch on it is a graph break.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from moebius.lowering.step import draw

from .values import SYMBOLIC, Break, RuntimeNumber

if TYPE_CHECKING:
    from ..sources import Source
    from .tensors import TensorOperations

PLAIN_NUMBERS = (int, float, bool)
# Functions of numbers that give a number and have no effect.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    f: f for f in (abs, pow, round, divmod, max, min, *(f for f in vars(math).values() if callable(f)))
}
# Clocks that give seconds.
CLOCKS = (time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time)
READINGS = frozenset((*CLOCKS, draw))  # another answer each time
# Operators whose result's shape is made of the values of their float arguments.
SHAPED_BY_FLOATS = frozenset({"arange", "range", "linspace", "logspace", "interpolate", "upsample"})


# Functions of numbers that answer yes or no.
QUESTIONS = frozenset(
    (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)
    + (math.isnan, math.isinf, math.isfinite)
)
LOGIC = frozenset((operator.and_, operator.or_, operator.xor))  # of two yes or no, another one


@dataclass(frozen=True, eq=False)
class AtSource:
    """The number that is found at a source at another call."""

    source: Source

    def __call__(self, values: dict[Source, Any]) -> Any:
        return values[self.source]


@dataclass(frozen=True, eq=False)
class Formula:
    """``function(*operands)`` of numbers found at another call. operands: AtSource, Formula, or plain values."""

    function: Callable[..., Any]
    operands: tuple

    def __call__(self, values: dict[Source, Any]) -> Any:
        return self.function(*(o(values) if isinstance(o, AtSource | Formula) else o for o in self.operands))


@dataclass(frozen=True, eq=False)
class Unchanged:
    """A guard: what ``evaluate`` gives for the numbers at ``sources`` is ``expected``, type and value."""

    evaluate: AtSource | Formula
    sources: tuple[Source, ...]
    expected: Any

    def __call__(self, *values: Any) -> bool:
        now = self.evaluate(dict(zip(self.sources, values, strict=True)))
        expected = self.expected
        return type(now) is type(expected) and (now == expected or (now != now and expected != expected))


class Number(RuntimeNumber):
    """A Python number at run time, a node of the graph while tracing.

    node: None for a number that is known but not computed by the graph (the answer of a look-up): it can be branched
    on, and becomes a constant where it is used.
    representative: a number of its type, today's value where ``evaluate`` is set.
    evaluate: computes it from the values at ``sources``, where it comes from the call's inputs alone.
    """

    __slots__ = ("__weakref__", "evaluate", "node", "numbers", "representative", "source", "sources")

    def __init__(
        self,
        numbers: Numbers,
        representative: Any,
        node: fx.Node | None,
        sources: tuple[Source, ...] | None = None,
        evaluate: AtSource | Formula | None = None,
    ):
        self.numbers, self.representative, self.node = numbers, representative, node
        self.sources, self.evaluate = sources, evaluate
        self.source: Source | None = None  # of an input itself

    @property
    def kind(self) -> type:
        """``type(value)``."""
        return type(self.representative)

    @property
    def known(self) -> bool:
        """Whether the representative is the value that this call has."""
        return self.evaluate is not None

    def settled(self) -> Any:
        """For an operator's argument: floats stay open, ints (which may be sizes) become constants under guards."""
        return self if self.kind is float and self.node is not None else self.numbers.constant(self)

    def of_sizes(self) -> Any:
        """The value of one without ``evaluate``, as a plain constant under guards; a graph break if nobody knows."""
        self.refuse()

    def refuse(self, *_: Any) -> NoReturn:
        raise Break(
            "tensor read as a number",
            f"Python needs the value of a {self.kind.__name__} that the graph computes",
            "keep it in arithmetic, or read it at the end of the step",
        )

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = __eq__ = __ne__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __str__ = __format__ = refuse
    __hash__ = object.__hash__


class Numbers:
    """All numbers of one trace."""

    def __init__(self, tensors: TensorOperations):
        self.tensors = tensors
        self.fixed: dict[int, Number] = {}

    def of_item(self, proxy: Any) -> Number:
        """``tensor.item()`` of a floating or boolean tensor with one element."""
        node = self.tensors.writer.node("call_method", "item", (proxy,), {})
        node.meta["val"] = None
        return Number(self, proxy.fake.dtype is torch.bool or 0.5, node)

    def read(self, name: str, function: Callable[[], float]) -> Number:
        """What a clock says, or Python's generator of random numbers gives, when the graph comes to it."""
        writer = self.tensors.writer
        if not self.tensors.whole_step or writer.scope.parent is not None or writer.recomputed:
            detail = f"{name} in a loop over experts, a checkpointed call or for a foreign backend"
            raise Break("call into C", detail, "it runs natively; keep it at the step's ends for one graph")
        node = writer.node("call_function", function, (), {})
        node.meta["val"] = None
        return Number(self, 0.5, node)

    def of_size(self, size: torch.SymInt | torch.SymFloat) -> Number:
        """A symbolic size beside a number: the graph has it as a Python number, too."""
        node = self.tensors.writer.argument(size)
        if not isinstance(node, fx.Node):
            raise Break("arithmetic of a size and a number", "that the graph computes", "convert the size first")
        return Number(self, 2 if isinstance(size, torch.SymInt) else 0.5, node)

    def of_input(self, value: int | float, source: Source) -> Number:
        """A number that differs from call to call, as an input of the graph."""
        self.tensors.guards.check("type", source, type(value), text=f"type is {type(value).__name__}")
        node = self.tensors.add_input(value, value, source).node
        number = Number(self, value, node, (source,), AtSource(source))
        number.source = source
        return number

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` on Python numbers, some of them unknown."""
        operands = tuple(self.of_size(o) if isinstance(o, torch.SymInt | torch.SymFloat) else o for o in operands)
        plain = [o.representative if isinstance(o, Number) else o for o in operands]
        if any(isinstance(o, SYMBOLIC) for o in operands):
            raise Break("arithmetic of a size and a number", "that the graph computes", "convert the size first")
        if not all(isinstance(o, PLAIN_NUMBERS) for o in plain):
            raise Break(
                "arithmetic on a number that the graph computes",
                f"{getattr(function, '__name__', function)} with {', '.join(type(o).__name__ for o in plain)}",
                "use plain numbers with it",
            )
        unknown = [o for o in operands if isinstance(o, Number)]
        known = all(o.known for o in unknown)
        try:
            result = function(*plain)
        except (ArithmeticError, ValueError) as error:
            if known:  # today's values: the error is the step's own
                self.tensors.writer.before_failure(function, operands)
                self.fix(*unknown)
                raise
            detail = f"{type(error).__name__}: {error}"
            raise Break("arithmetic that may fail", detail, "compute it after the step") from None
        if type(result) not in PLAIN_NUMBERS:
            raise Break("arithmetic on a number", f"gives a {type(result).__name__}", "compute it after the step")
        tells = function in QUESTIONS or (function in LOGIC and type(result) is bool)
        if not known and type(result) is not float and not tells:
            for o in unknown:
                o.refuse()  # an int or a bool of a value that nobody knows: too little can be said of it
        node = None
        if all(o.node is not None for o in unknown):
            node = self.tensors.writer.node("call_function", function, operands, {})
            node.meta["val"] = None
        if not known:
            return Number(self, representative_of(result), node)
        return Number(self, result, node, *self.again(function, operands))

    def look_up(self, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` for any pure function of known numbers and plain values; no node of the graph."""
        result = function(*(self.today(o) for o in operands))
        if type(result) not in PLAIN_NUMBERS:
            return function(*(self.constant(o) if isinstance(o, Number) else o for o in operands))
        return Number(self, result, None, *self.again(function, operands))

    def today(self, operand: Any) -> Any:
        if not isinstance(operand, Number):
            return operand
        if not operand.known:
            operand.refuse()
        return operand.representative

    def again(self, function: Callable[..., Any], operands: tuple) -> tuple[tuple[Source, ...], Formula]:
        """Where the numbers come from, and how the result is computed from what is found there at another call."""
        sources = tuple({s: None for o in operands if isinstance(o, Number) for s in o.sources or ()})
        return sources, Formula(function, tuple(o.evaluate if isinstance(o, Number) else o for o in operands))

    def fix(self, *numbers: Number) -> list[Any]:
        """The numbers as the plain values that they have today, under guards; a graph break where nobody knows."""
        return [self.constant(n) for n in numbers]

    def constant(self, number: Number) -> Any:
        """The value of a number as a plain constant: a guard that it stays so."""
        if number.evaluate is None:
            return number.of_sizes()
        if id(number) not in self.fixed:
            self.fixed[id(number)] = number
            self.guard(number, number.representative)
        return number.representative

    def truth(self, number: Number) -> bool:
        """``bool(number)``: a guard on that alone."""
        if number.evaluate is None:
            if (known := self.tensors.speculate(number)) is not None:
                return known
            number.refuse()
        found = number if number.kind is bool else self.apply(bool, number)
        return self.constant(found)

    def guard(self, number: Number, expected: Any) -> None:
        sources, evaluate = number.sources or (), number.evaluate
        assert evaluate is not None
        names = ", ".join(s.name for s in sources)
        unchanged = Unchanged(evaluate, sources, expected)
        self.tensors.guards.holds(names, f"what the step computes of it is {expected!r}", unchanged, *sources)


def representative_of(value: Any) -> Any:
    """A number of the same type that no arithmetic treats specially."""
    return 0.5 if isinstance(value, float) and not (math.isfinite(value) and value) else value


EXAMPLES: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 0.5, torch.SymBool: True}


def example(value: Any) -> Any:
    """A number of the same type, of which Python says at once what cannot be done with such a number."""
    return value.representative if isinstance(value, Number) else EXAMPLES.get(type(value), value)


COMPARISONS: dict[str, Callable[..., Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
OPERATIONS: dict[str, Callable[..., Any]] = COMPARISONS | {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}
UNARY: dict[str, Callable[..., Any]] = {"-": operator.neg, "+": operator.pos, "~": operator.invert}

__all__ = ["FUNCTIONS", "OPERATIONS", "UNARY", "Number", "Numbers"]
