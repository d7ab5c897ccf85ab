"""Arithmetic on numbers that only the running step knows: as nodes, and as formulas over the inputs."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step import draw_array
from moebius.lowering.step.arrays import LargeNumberError, computed_quietly

from ..guards.sources import Source
from ..torch_facts import torch_private, torch_sizes
from ..values.formulas import AtSource, Formula, OfType, Raises, Unchanged, computed, in_order, in_words
from ..values.numbers import CLOCKS, NUMBERS, PLAIN_NUMBERS, Number, numpy_numbers_in
from ..values.numpy_numbers import NUMPY_NUMBERS, is_numpy_function
from ..values.values import Break, TensorProxy
from .graphs import ELSEWHERE, GraphScope
from .interfaces import TensorOperators

TYPES: frozenset[Any] = frozenset(NUMBERS)
# Modules of functions in C whose result's type follows from the types of the operands.
ONE_TYPE = frozenset({"math", "cmath", "_operator"})
# Functions of numbers that answer yes or no.
QUESTIONS = frozenset(
    (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge, operator.not_)
    + (math.isnan, math.isinf, math.isfinite)
)
RESULTS = NUMPY_NUMBERS | TYPES
PLAIN_OPERANDS = RESULTS | {str, type(None)}
CERTAIN = frozenset({operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, abs, min, max})
READ = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool)  # as Python's floats, and yes or no
SHORT = 64  # numbers of a list, each of which is a node
WHOLE = frozenset((int, math.floor, math.ceil, math.trunc, round))  # that give an int of a float
LOGIC = frozenset((operator.and_, operator.or_, operator.xor))  # of two yes or no, another one


class Numbers:
    """All numbers of one trace."""

    def __init__(self, tensors: TensorOperators):
        self.tensors, self.writer, self.guards = tensors, tensors.writer, tensors.guards
        self.world = tensors.world
        self.fixed: dict[int, Number] = {}
        self.sizes: dict[Any, Number] = {}  # by symbol: numbers that became sizes
        self.small: set[str] = set()  # those that are constants where sizes are wanted, in words
        self.deciding: set[str] = set()  # places of those on which a branch went another way in another call
        self.seen = 0  # inputs that were looked at for symbols
        self.places: dict[Any, tuple[Source, int | None]] = {}  # by symbol: the input, and the axis of a tensor
        self.refuse_varying: Callable[[tuple[Source, ...]], None] = lambda sources: None  # set by the trace

    def of_item(self, proxy: Any) -> Number:
        """``tensor.item()`` of a floating or boolean tensor with one element."""
        node = self.writer.call("item", proxy)
        return Number(self, proxy.fake.dtype is torch.bool or 0.5, node)

    def item_of(self, proxy: Any) -> Number | None:
        """The same, None where it is to be a graph break."""
        if proxy.fake.dtype not in READ or proxy.fake.numel() != 1:
            return None
        writer, gradients = self.writer, self.tensors.gradients
        with writer.in_front((proxy.node,), GraphScope.only_asks):
            inner = writer.is_inner and not gradients.in_a_hook
            lost = (inner or writer.in_loop) and not writer.scope.is_never_repeated()
            return None if lost else self.of_item(proxy)

    def list_of(self, proxy: Any) -> list[Number] | None:
        """``tensor.tolist()`` of such a vector, if it is short; else None."""
        fake, writer = proxy.fake, self.writer
        if not self.tensors.whole_step or fake.dtype not in READ or fake.dim() != 1 or writer.is_inner:
            return None
        if not is_kind(fake.shape[0], int) or fake.shape[0] > SHORT:
            return None
        node = writer.call("tolist", proxy)
        items = [writer.call(operator.getitem, node, i) for i in range(fake.shape[0])]
        return [Number(self, fake.dtype is torch.bool or 0.5, item) for item in items]

    def of_array(
        self, function: Callable[..., Any], args: tuple, value: Any, sources: tuple[Source, ...] | None = None,
        evaluate: Formula | None = None,
    ) -> Number:  # fmt: skip
        """A number of numpy's that an array has. value: today's where ``evaluate`` is given, else one of its type."""
        node = self.writer.call(function, *args)
        return Number(self, value, node, sources, evaluate)

    def read(self, name: str, function: Callable[[], float]) -> Number:
        """What a clock says, or Python's generator of random numbers gives, when the graph comes to it."""
        once = function in CLOCKS and self.tensors.whole_step and self.writer.runs_at_most_once
        return Number(self, 0.5, self.writer.call(function) if once else self.drawn(name, function, ()))

    def drawn(self, name: str, function: Callable[..., Any], args: tuple) -> fx.Node:
        """A call that gives another number each time, where the graph comes to it."""
        if not self.tensors.runs_once:
            hint = "it runs natively; call it before or after the step for one graph"
            raise Break("call into C", f"{name} {ELSEWHERE}", hint)
        return self.writer.call(function, *args)

    def drawn_array(self, name: str, args: list, shape: tuple, dtype: torch.dtype | None) -> TensorProxy:
        """The tensor over the memory of an array that numpy's generator draws. dtype: None where that fails."""
        if dtype is None:
            self.writer.before_failure(draw_array, (name, *args))
            raise Break("call into C", f"numpy.random.{name} with these arguments", "it runs natively")
        node = self.drawn(f"numpy.random.{name}", draw_array, (name, *args))
        return self.tensors.wrap(self.world.call(torch.empty, (shape,), {"dtype": dtype, "device": "cpu"}), node)

    def of_input(self, value: int | float, source: Source) -> Number:
        """A number that differs from call to call, as an input of the graph."""
        self.guards.check("type", source, type(value), text=f"type is {type(value).__name__}")
        node = self.tensors.add_input(value, value, source).node
        number = Number(self, value, node, (source,), AtSource(source))
        number.source = source
        return number

    # ------------------------------------------------------------------------------------------------------------------
    # Sizes
    # ------------------------------------------------------------------------------------------------------------------

    def decides(self, value: Any) -> bool:
        """Whether it is a number that is known as the call begins, or a relation of such, and that had branches go
        another way in another call."""
        if not self.deciding:
            return False
        found: Any = ()
        if type(value) in (torch.SymInt, torch.SymFloat, torch.SymBool):
            found = (self.formula_of_size(value) or ((), ()))[1]
        elif type(value) is Number and value.known and value.node is not None:
            found = value.sources or ()
        return bool(found) and {source.name for source in found} <= self.deciding

    def of_size(self, size: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
        """A symbolic size as a Python number: the graph has it as one, and what it follows from is known."""
        node = self.writer.argument(size)
        if not is_kind(node, fx.Node):
            return node
        found = self.formula_of_size(size)
        if found is None:
            return Number(self, 2 if is_kind(size, torch.SymInt) else 0.5, node)
        evaluate, sources = found
        real = {p.source: p.real for p in self.tensors.inputs if p.source in sources}
        return Number(self, computed(in_order(evaluate), real), node, sources, evaluate)

    def known(self, value: Any) -> Number | None:
        """The value as a number whose value of today is known, None for any other."""
        number = self.of_size(value) if type(value) in (torch.SymInt, torch.SymFloat) else value
        return number if type(number) is Number and number.known else None

    def formula_of_size(self, size: Any) -> tuple[Formula, tuple[Source, ...]] | None:
        """How a size follows from the inputs; None where it depends on values."""
        return None if torch_private.depends_on_values(size) else self.formula_of(torch_private.expression(size))

    def formula_of(self, expression: Any) -> tuple[Formula, tuple[Source, ...]] | None:
        """The same of an expression over sizes."""
        symbols = sorted(expression.free_symbols, key=str)
        operands: list[AtSource | Formula] = []
        sources: dict[Source, None] = {}
        self.look_for_symbols()
        for symbol in symbols:
            number = self.sizes.get(symbol)
            if number is not None and number.evaluate is not None:
                operands.append(number.evaluate)
                sources.update(dict.fromkeys(number.sources or ()))
            elif symbol in self.places:
                source, axis = self.places[symbol]
                here = AtSource(source)
                operands.append(here if axis is None else Formula(size_of, (here, axis)))
                sources[source] = None
            else:
                return None
        names = [f"n{i}" for i in range(len(symbols))]
        text = torch_sizes.expression_text(expression, dict(zip(symbols, names, strict=True)))
        return Formula(torch_sizes.compiled(text, names), tuple(operands)), tuple(sources)

    def look_for_symbols(self) -> None:
        """In the inputs that came since the last look."""
        inputs = self.tensors.inputs
        for proxy in inputs[self.seen :]:
            is_tensor = is_kind(proxy.fake, torch.Tensor)
            for axis, size in enumerate(proxy.node.meta["sizes"] if is_tensor else (proxy.fake,)):
                if torch_private.is_symbolic(size) and (symbol := torch_private.raw_symbol(size)) is not None:
                    assert proxy.source is not None
                    self.places.setdefault(symbol, (proxy.source, axis if is_tensor else None))
        self.seen = len(inputs)

    def size_of(self, value: Any) -> Any:
        """The value, with sizes for the ints in it that vary and are known."""
        if type(value) in (tuple, list):
            return tuple(map(self.size_of, value))
        return self.as_size(value) if type(value) is Number and value.kind is int and value.known else value

    def as_size(self, number: Number) -> Any:
        """An int where it may be a size, an index or a bound: a symbol of its own, and a constant only where it is 0 or
        1, which torch treats apart."""
        value = number.representative
        if number.size is not None:
            return number.size
        scope = self.scope_of(number)
        if number.kind is not int or number.evaluate is None or scope is None or id(number) in self.fixed:
            return self.constant(number)
        if value in (0, 1) and self.is_apart(in_words(in_order(number.evaluate))):
            return self.constant(number)
        number.size = self.world.symbolic_int(value, f"number_{len(self.sizes)}")
        node = number.node
        symbol = torch_private.raw_symbol(number.size)
        assert node is not None
        self.sizes[symbol] = number
        scope.symbols[symbol] = lambda: node
        return number.size

    def is_apart(self, number: str) -> bool:
        """Whether a number that is 0 or 1 is a constant as a size: for a trace that finds a failure, as captured."""
        if self.writer.stop_number is None:
            self.small.add(number)
        return number in self.small

    def scope_of(self, number: Number) -> Any:
        """The open scope whose graph computes the number."""
        innermost = self.writer.scope
        return None if number.node is None else innermost.scope_of(number.node)

    # ------------------------------------------------------------------------------------------------------------------
    # What is computed
    # ------------------------------------------------------------------------------------------------------------------

    def open(self, operand: Any) -> Any:
        """An operand with the symbolic sizes in it as numbers; None for what no function of numbers takes."""
        if is_kind(operand, torch.SymInt | torch.SymFloat):
            return self.of_size(operand)
        if type(operand) is torch.SymBool:
            return self.tensors.symbolic_truth(operand)
        if type(operand) in (list, tuple):
            return type(operand)(map(self.open, operand))
        return operand

    def examples(self, operand: Any) -> Any:
        """An operand with some number of its type for each that only the running step knows."""
        return today_of(self.open(operand))

    def apply(self, function: Callable[..., Any], *operands: Any, method: str = "", **named: Any) -> Any:
        """``function(*operands, **named)``, a function of numbers in C, some of them unknown; or their lists.

        method: its name, where it is one of the first operand's type.
        """
        operands, named = self.open(operands), {k: self.open(v) for k, v in named.items()}
        unknown = [*numbers_in((*operands, *named.values()))]
        if is_numpy_function(function) or function in NUMPY_NUMBERS or numpy_numbers_in((*operands, *named.values())):
            return self.apply_numpy(function, operands, named, unknown)
        if not unknown:
            return function(*operands, **named)
        self.check_operands(function, operands, named)
        known = all(o.known for o in unknown)
        result = self.result_now(function, operands, named, known)
        tells = function in QUESTIONS or (function in LOGIC and type(result) is bool)
        if not known and type(result) not in (float, complex) and not tells:
            whole = self.whole(function, operands, unknown) if function in WHOLE and type(result) is int else None
            if whole is not None:
                return whole
            for o in unknown:
                o.refuse()  # an int or a bool of a value that nobody knows: too little can be said of it
        evaluate = None
        sources: tuple[Source, ...] = ()
        if known:
            sources, evaluate = self.again(function, operands, named)
            if not has_one_type(function, operands):
                self.guard(OfType(evaluate, sources, type(result)))
        node = None
        if all(o.node is not None for o in unknown):
            with self.writer.in_front((o.node for o in unknown if o.node), lambda _: never_fails(function, operands)):
                node = self.writer.call(method or function, *operands, **named)
        return self.given(result, node, sources, evaluate)

    def whole(self, function: Callable[..., Any], operands: tuple, unknown: list[Number]) -> Any:
        """``int(x)`` of a number that only the running step knows: what a tensor of one int gives."""
        if not self.tensors.whole_step or self.writer.is_inner or any(one.node is None for one in unknown):
            return None
        node, found, scope = self.writer.call(function, *operands), self.world.unknown_number(), self.writer.scope
        node.meta["val"] = found
        scope.symbols[torch_private.expression(found)] = lambda: node
        return found

    def apply_numpy(self, function: Callable[..., Any], operands: tuple, named: dict[str, Any], unknown: list) -> Any:
        """The same with numpy's numbers or functions. The graph has it as what plain Python may be asked for again:
        where numpy would warn, or give another type (of an int that is too large for its own)."""
        self.check_operands(function, operands, named)
        writer = self.writer
        if unknown and not self.tensors.runs_once:
            raise Break("numpy's function of a number", f"{name_of(function)}, {ELSEWHERE}", "compute it before")
        known = all(o.known for o in unknown)
        quietly = (lambda f, _=None: f) if function in TYPES else computed_quietly  # float(x) has nothing to say
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = self.result_now(quietly(function), operands, named, known)
        except (LargeNumberError, Warning) as error:
            if unknown:
                writer.before_failure(quietly(function), operands)
            raise Break("numpy's function of a number", str(error), "it runs natively") from None
        if not unknown:
            return self.constant_result(function, result)
        if not known and type(result) not in (float, np.float64, np.float32, np.float16, np.bool_, bool):
            writer.before_failure(quietly(function), operands)
            for o in unknown:
                o.refuse()
        kind: Any = type(result)
        target = quietly(function, kind)
        evaluate = None
        sources: tuple[Source, ...] = ()
        if known:
            sources, evaluate = self.again(target, operands, named)
        node = None
        if all(o.node is not None for o in unknown):
            node = writer.call(target, *operands, **named)
        elif known:
            assert evaluate is not None
            self.guard(OfType(evaluate, sources, type(result)))
        return self.given(result, node, sources, evaluate)

    def constant_result(self, function: Any, result: Any) -> Any:
        """What numpy gives for numbers that stay, if it is a number or some."""
        if all(type(item) in RESULTS for item in (result if type(result) is tuple else (result,))):
            return result
        raise Break("call into C", f"{name_of(function)} gives a {type(result).__name__}", "it runs natively")

    def check_operands(self, function: Callable[..., Any], operands: tuple, named: dict[str, Any]) -> None:
        if not all(is_operand(o) for o in (*operands, *named.values())):
            raise Break(
                "arithmetic on a number that the graph computes",
                f"{name_of(function)} with {', '.join(type(today_of(o)).__name__ for o in operands)}",
                "use plain numbers with it",
            )

    def result_now(self, function: Callable[..., Any], operands: tuple, named: dict[str, Any], known: bool) -> Any:
        """What ``sample`` gives; its error, where it is the step's own, under a guard."""
        try:
            return self.sample(function, operands, named, known)
        except (LargeNumberError, Warning):
            raise
        except Exception as error:
            if next(numbers_in((*operands, *named.values())), None) is None:
                raise
            self.writer.before_failure(function, operands)
            if not known and not is_kind(error, TypeError):
                detail = f"{type(error).__name__}: {error}"
                raise Break("arithmetic that may fail", detail, "compute it after the step") from None
            if known and not is_kind(error, TypeError):  # today's values: the error is the step's own
                found, formula = self.again(function, operands, named)
                self.guard(Raises(formula, found, error))
            raise

    def given(self, result: Any, node: fx.Node | None, sources: tuple[Source, ...], evaluate: Formula | None) -> Any:
        """What a function of numbers gives as a value of the trace."""
        kind = type(result)
        if kind in NUMBERS or kind in NUMPY_NUMBERS:
            return Number(self, result if evaluate else representative_of(result), node, sources or None, evaluate)
        if kind is str and evaluate is not None and self.tensors.whole_step:
            return self.tensors.texts.computed(result, node, sources, evaluate)
        if kind is tuple and evaluate is not None:  # divmod, frexp, as_integer_ratio
            items = []
            for i, item in enumerate(result):
                part = None
                if node is not None:
                    part = self.writer.call(operator.getitem, node, i)
                items.append(self.given(item, part, sources, Formula(operator.getitem, (evaluate, i))))
            return tuple(items)
        if evaluate is None or kind not in (bytes, type(None), type(NotImplemented)):
            raise Break("arithmetic on a number", f"gives a {kind.__name__}", "compute it after the step")
        self.hold(evaluate, sources, result)
        return result

    def sample(self, function: Callable[..., Any], operands: tuple, named: dict[str, Any], known: bool) -> Any:
        """What the function gives today, or for some numbers that it takes, where today's are not known."""
        failed: Exception | None = None
        for stand_in in (None,) if known else (None, 2.0, -0.5, 0.25):
            try:
                return function(*today_of(operands, stand_in), **{k: today_of(v, stand_in) for k, v in named.items()})
            except (ArithmeticError, ValueError, LookupError) as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def look_up(self, function: Callable[..., Any], *operands: Any) -> Any:
        """``function(*operands)`` for any pure function of known numbers and plain values; no node of the graph."""
        operands = self.open(operands)
        if not all(o.known for o in numbers_in(operands)):
            next(o for o in numbers_in(operands) if not o.known).refuse()
        result = function(*today_of(operands))
        if type(result) not in PLAIN_NUMBERS:
            return function(*(self.constant(o) if is_kind(o, Number) else o for o in operands))
        return Number(self, result, None, *self.again(function, operands))

    def again(
        self, function: Callable[..., Any], operands: tuple, named: dict[str, Any] | None = None
    ) -> tuple[tuple[Source, ...], Formula]:
        """Where the numbers come from, and how the result is computed from what is found there at another call."""
        named = named or {}
        every = numbers_in((*operands, *named.values()))
        sources = tuple({s: None for o in every for s in o.sources or ()})
        return sources, Formula(function, formulas_in(operands), {k: formulas_in(v) for k, v in named.items()})

    def found_again(self, value: Any) -> tuple[Any, tuple[Source, ...], Any] | None:
        """Of a number or text that varies, or a tuple with some: what it is today, where it comes from and how it is
        computed again. None where nothing varies, or nobody knows what it is."""
        opened = self.open(value)
        unknown = [*numbers_in(opened)]
        if not unknown or not all(number.known for number in unknown):
            return None
        sources, formula = self.again(tuple, (opened,))
        return today_of(opened), sources, formula.operands[0]

    # ------------------------------------------------------------------------------------------------------------------
    # Guards
    # ------------------------------------------------------------------------------------------------------------------

    def constant(self, number: Number) -> Any:
        """The value of a number as a plain constant: a guard that it stays so."""
        if number.evaluate is None:
            number.refuse()
        if id(number) not in self.fixed:
            self.refuse_varying(number.sources or ())
            self.fixed[id(number)] = number
            self.hold(number.evaluate, number.sources or (), number.representative)
        return number.representative

    def truth(self, number: Number) -> bool:
        """``bool(number)``: a guard on that alone."""
        if number.evaluate is None:
            if (known := self.tensors.speculate(number)) is not None:
                return known
            number.refuse()
        found = number if number.kind is bool else self.apply(bool, number)
        return self.constant(found)

    def hold_relation(self, relation: Any) -> None:
        """Something that torch assumed of sizes, some of which are numbers that the step computes."""
        found = self.formula_of(relation)
        assert found is not None, f"{relation} is of no input"
        self.hold(*found, True)

    def hold(self, evaluate: AtSource | Formula, sources: tuple[Source, ...], expected: Any) -> None:
        self.guard(Unchanged(evaluate, sources, expected))

    def both_ways(self, condition: Any) -> Number:
        """The same number, on which a branch goes as the running step finds it."""
        known = condition if type(condition) is Number else self.of_size(condition)
        twin = Number(self, known.representative, known.node, known.sources, known.evaluate)
        twin.goes_both_ways = True
        return twin

    def guard(self, found: Unchanged | OfType | Raises) -> None:
        self.guards.holds(", ".join(s.name for s in found.sources), lambda: str(found), found, *found.sources)


def size_of(tensor: torch.Tensor, axis: int) -> int:
    """``tensor.shape[axis]``."""
    return tensor.shape[axis]


def name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or str(function)


def numbers_in(operand: Any) -> Iterator[Number]:
    """The numbers in an operand."""
    if is_kind(operand, Number):
        yield operand
    elif type(operand) in (list, tuple):
        for item in operand:
            yield from numbers_in(item)


def today_of(operand: Any, stand_in: Any = None) -> Any:
    """An operand with today's values in it. stand_in: for floats of which nobody knows that."""
    if is_kind(operand, Number):
        replaced = stand_in is not None and operand.kind is float and not operand.known
        return stand_in if replaced else operand.representative
    if type(operand) in (list, tuple):
        return type(operand)(today_of(item, stand_in) for item in operand)
    return operand


def formulas_in(operand: Any) -> Any:
    """An operand with the formulas of its numbers in their place."""
    if is_kind(operand, Number):
        return operand.evaluate
    if type(operand) in (list, tuple):
        return type(operand)(map(formulas_in, operand))
    return operand


def is_operand(operand: Any) -> bool:
    """Whether functions of numbers may be given it: a number, a text, or a list or tuple of such."""
    if type(operand) in (list, tuple):
        return all(map(is_operand, operand))
    if type(operand) is dict:
        return all(is_operand(v) and type(k) in (*NUMBERS, str) for k, v in operand.items())
    return type(operand) in PLAIN_OPERANDS or type(operand) is Number


def never_fails(function: Any, operands: tuple) -> bool:
    """Whether no numbers of these types make it raise: a large int is no float, and nothing is divided by zero."""
    plain = today_of(operands)
    if not all(type(o) in (int, float, bool) for o in plain):
        return False
    if function is operator.truediv:
        return type(plain[0]) is float and type(operands[1]) in (int, float) and operands[1] != 0
    mixed = any(type(o) is Number and o.kind is int for o in operands) and float in map(type, plain)
    return function in QUESTIONS or (function in CERTAIN and not mixed)


def has_one_type(function: Any, operands: tuple) -> bool:
    """Whether the types of the operands alone say what type the result has."""
    plain = today_of(operands)
    if function is operator.getitem:
        items = plain[0].values() if type(plain[0]) is dict else plain[0]
        return len({type(item) for item in items}) == 1
    if function in (max, min):
        return len({type(o) for o in (plain[0] if len(plain) == 1 else plain)}) == 1
    if function in (pow, operator.pow) and len(plain) == 2:
        base, exponent = plain
        if type(exponent) in (int, bool):  # 2 ** -1 is a float
            return type(base) in (float, complex) or (not is_kind(operands[1], Number) and exponent >= 0)
        return complex in (type(base), type(exponent)) or (not is_kind(operands[0], Number) and base > 0)
    return getattr(function, "__module__", None) in ONE_TYPE or function in TYPES or function in (abs, round, divmod)


def representative_of(value: Any) -> Any:
    """A number of the same type that no arithmetic treats specially."""
    floating = is_kind(value, float | np.floating)
    return type(value)(0.5) if floating and not (math.isfinite(value) and value) else value
