"""How a number follows from what another call finds: formulas over sources, and the guards on what they give.

A formula is evaluated at each call that asks its guard, each part of it once, without recursion: a schedule may
compute for thousands of operations before it branches.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moebius.interpreter import is_kind
from moebius.interpreter.domain.operators import COMPARISONS, OPERATIONS, UNARIES

from ..guards.recorder import shown
from ..guards.sources import Source, with_values


@dataclass(frozen=True, eq=False)
class AtSource:
    """What is found at a source at another call: a number, or a tensor whose size counts."""

    source: Source


@dataclass(frozen=True, eq=False)
class Formula:
    """``function(*operands, **named)``. operands: AtSource, Formula, plain values, or lists and tuples of such."""

    function: Callable[..., Any]
    operands: tuple
    named: dict[str, Any] = field(default_factory=dict)


def parts_of(operand: Any) -> Iterator[AtSource | Formula]:
    """The formulas in an operand."""
    if is_kind(operand, AtSource | Formula):
        yield operand
    elif type(operand) in (list, tuple):
        for item in operand:
            yield from parts_of(item)


def in_order(formula: AtSource | Formula) -> list[AtSource | Formula]:
    """The formula and all that it is made of, each once, operands first."""
    found: dict[AtSource | Formula, None] = {}
    pending: list[tuple[AtSource | Formula, bool]] = [(formula, False)]
    while pending:
        one, ready = pending.pop()
        if one in found:
            continue
        inner = [] if is_kind(one, AtSource) else [*parts_of(one.operands), *parts_of([*one.named.values()])]
        if ready or all(part in found for part in inner):
            found[one] = None
        else:
            pending.append((one, True))
            pending += [(part, False) for part in inner]
    return list(found)


def computed(order: list[AtSource | Formula], values: dict[Source, Any]) -> Any:
    """What the last formula of ``order`` gives. Raises what its functions raise."""
    known: dict[Any, Any] = {}

    def given(operand: Any) -> Any:
        if is_kind(operand, AtSource | Formula):
            return known[operand]
        if type(operand) in (list, tuple):
            return type(operand)(map(given, operand))
        return operand

    for one in order:
        if is_kind(one, AtSource):
            known[one] = values[one.source]
        else:
            known[one] = one.function(*map(given, one.operands), **{k: given(v) for k, v in one.named.items()})
    return known[order[-1]]


def as_function(order: list[AtSource | Formula], sources: tuple[Source, ...]) -> Callable[..., Any]:
    """``computed`` as a function of what is found at the sources, in their order: a line for each formula."""
    names: dict[Any, str] = {}
    constants: dict[str, Any] = {}

    def given(operand: Any) -> str:
        if is_kind(operand, AtSource | Formula):
            return names[operand]
        if type(operand) in (list, tuple):
            items = "".join(f"{given(item)}, " for item in operand)
            return f"[{items}]" if type(operand) is list else f"({items})"
        return constant(operand)

    def constant(value: Any) -> str:
        constants[name := f"c{len(constants)}"] = value
        return name

    lines = [f"def formula({', '.join(f's{place}' for place in range(len(sources)))}):"]
    places = {source: place for place, source in enumerate(sources)}
    for number, one in enumerate(order):
        if is_kind(one, AtSource):
            names[one] = f"s{places[one.source]}"
            continue
        operands = [*map(given, one.operands), *(f"**{{{name!r}: {given(part)}}}" for name, part in one.named.items())]
        lines.append(f" v{number} = {constant(one.function)}({', '.join(operands)})")
        names[one] = f"v{number}"
    exec("\n".join([*lines, f" return {names[order[-1]]}"]), constants)
    return constants.pop("formula")


class Computation:
    """Gives what a formula gives for what is found at ``sources``. One that is called often becomes Python code."""

    def __init__(self, order: list[AtSource | Formula], sources: tuple[Source, ...]):
        self.order, self.sources, self.calls = order, sources, 0
        self.function: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        if self.function is None:
            self.calls += 1
            if self.calls < OFTEN:
                return computed(self.order, dict(zip(self.sources, values, strict=True)))
            self.function = as_function(self.order, self.sources)
        return self.function(*values)


INFIX = {function: op for op, function in OPERATIONS.items() if op[-1] != "="}
INFIX |= {function: op for op, function in COMPARISONS.items()}
PREFIX = {function: op for op, (function, _) in UNARIES.items()} | {operator.not_: "not "}
LONGEST = 120  # of what a report shows
OFTEN = 8  # calls, from which on code is made: it takes as long as some calls


def in_words(order: list[AtSource | Formula]) -> str:
    """The last formula of ``order`` as Python writes it, with the names of the places: ``L['it'] % 4 == 0``."""
    known: dict[Any, tuple[str, bool]] = {}  # and whether it binds less than an operand does

    def given(operand: Any, closed: bool = True) -> str:
        if is_kind(operand, AtSource | Formula):
            text, is_open = known[operand]
            return f"({text})" if closed and is_open else text
        if type(operand) in (list, tuple):
            items = ", ".join(given(item, False) for item in operand)
            return f"[{items}]" if type(operand) is list else f"({items}{',' * (len(operand) == 1)})"
        return shown(operand)

    for one in order:
        if is_kind(one, AtSource):
            known[one] = one.source.name, False
            continue
        function, operands = one.function, one.operands
        if function in INFIX and len(operands) == 2:
            found = f" {INFIX[function]} ".join(map(given, operands)), True
        elif function in PREFIX:
            found = PREFIX[function] + given(operands[0]), True
        elif function is bool:
            found = known.get(operands[0], (given(operands[0]), False))
        elif function is operator.getitem:
            found = f"{given(operands[0])}[{given(operands[1], False)}]", False
        elif (text := getattr(function, "text", None)) is not None:  # of sizes, with n0, n1, … for the operands
            found = filled(text, [*map(given, operands)]), True
        else:
            named = [f"{name}={given(value, False)}" for name, value in one.named.items()]
            called = getattr(function, "__qualname__", type(function).__name__)
            found = f"{called}({', '.join([*(given(operand, False) for operand in operands), *named])})", False
        known[one] = (found[0] if len(found[0]) <= LONGEST else f"{found[0][: LONGEST - 1]}…"), found[1]
    return known[order[-1]][0]


def filled(text: str, operands: list[str]) -> str:
    """A text with the operands for n0, n1, …."""
    return re.sub(r"\bn(\d+)\b", lambda found: operands[int(found[1])], text)


class Guard:
    """A guard: what a formula gives for what is found at ``sources`` is as it was. was: what, in words."""

    was: str

    def __init__(self, evaluate: AtSource | Formula, sources: tuple[Source, ...]):
        self.evaluate, self.sources, self.order = evaluate, sources, in_order(evaluate)
        self.now = Computation(self.order, sources)

    def __str__(self) -> str:
        text = in_words(self.order)
        return text if self.was == "True" else f"{text} is {self.was}"

    def differs(self, values: tuple) -> tuple[str, str, str]:
        """Of a call for which it does not hold: what it is about, what that was, and what it is."""
        try:
            now = shown(self.now(*values))
        except Exception as error:
            now = f"a {type(error).__name__}"
        if is_kind(self.evaluate, Formula):
            now += with_values(self.sources, values)
        return in_words(self.order), self.was, now


class Unchanged(Guard):
    """The same value of the same type."""

    def __init__(self, evaluate: AtSource | Formula, sources: tuple[Source, ...], expected: Any):
        super().__init__(evaluate, sources)
        self.expected, self.was = expected, shown(expected)

    def __call__(self, *values: Any) -> bool:
        try:
            return is_one_value(self.now(*values), self.expected)
        except Exception:  # it gave something then
            return False


class OfType(Guard):
    """A value of this type."""

    def __init__(self, evaluate: AtSource | Formula, sources: tuple[Source, ...], kind: type):
        super().__init__(evaluate, sources)
        self.kind, self.was = kind, f"a {kind.__name__}"

    def __call__(self, *values: Any) -> bool:
        try:
            return type(self.now(*values)) is self.kind
        except Exception:
            return False


class Raises(Guard):
    """The same error, in the same words."""

    def __init__(self, evaluate: Formula, sources: tuple[Source, ...], error: Exception):
        super().__init__(evaluate, sources)
        self.kind, self.words, self.was = type(error), str(error), f"a {type(error).__name__}"

    def __call__(self, *values: Any) -> bool:
        try:
            self.now(*values)
        except Exception as error:
            return type(error) is self.kind and str(error) == self.words
        return False


def is_one_value(a: Any, b: Any) -> bool:
    """Whether nothing tells the two apart: types and values; 0.0 and -0.0 are two, a NaN is one."""
    if type(a) is not type(b):
        return False
    if is_kind(a, tuple | list):
        return len(a) == len(b) and all(map(is_one_value, a, b))
    return (a == b and (a != 0 or repr(a) == repr(b))) or (a != a and b != b)
