"""Functions with graph breaks anywhere in loops, handlers, with-blocks, generators and inner functions.

`brk` is a graph break, `bad` one that raises a TypeError for some numbers. A variable may be unset where it is read.
"""

from __future__ import annotations

import abc
import os
import warnings
from typing import Any

import torch
from fuzz.choices import Choices, pick

from moebius import capture, reset, stats

DEEPEST, STATEMENTS, CALLS = 5, 12, 3


class Abstract(abc.ABC):
    @abc.abstractmethod
    def method(self) -> None: ...


class Refused(Abstract):
    def __new__(cls, number: int) -> Any:
        return super().__new__(cls)


def drawn(number: int) -> int:
    length = len(os.urandom(1))  # C code of which capture knows nothing: the graph break, two frames inside
    return number + 1 - length


def brk(number: int) -> int:
    return drawn(number)


def bad(number: int) -> Any:
    return Refused(number) if number % 3 == 1 else brk(number)


class Context:
    def __init__(self, log: list, swallows: bool = False):
        self.log, self.swallows = log, swallows

    def __enter__(self) -> int:
        self.log.append("in")
        return 3

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.log.append(("out", kind and kind.__name__))
        return self.swallows


GENERATOR = """\
    def iterations(n):
        for i in range(3):
            try:
                yield i * bad(n + i)
            except TypeError:
                yield 100
            finally:
                log.append('g')
"""


class Breaks:
    """Writes one program."""

    def __init__(self, choices: Choices):
        self.choices = choices
        self.counters = 0
        self.left = STATEMENTS
        self.helpers: list[str] = []

    def percent(self) -> int:
        return self.choices.below(100)

    def name(self) -> str:
        return pick(self.choices, "abcde")

    def expression(self) -> str:
        kind = self.percent()
        if kind < 25:
            return str(self.choices.below(6))
        if kind < 50:
            return self.name()
        inner = self.expression()
        if kind < 75:
            return f"bad({inner})" if kind < 65 else f"brk({inner})"
        if kind < 85:
            return f"({inner} + {self.expression()})"
        if kind < 90:
            return f"len([{inner}, *log])"
        if kind < 93:
            return f"(lambda q: q + {self.choices.below(4)})({inner})"
        if kind < 98 and self.helpers:
            return f"helper({inner})" if kind < 96 else f"sum(iterations({inner}))"
        return f"[{inner} for z in (0, 1)][0]"

    def simple(self, kind: int, looping: bool) -> str:
        if kind < 12:
            return f"{self.name()} = {self.expression()}"
        if kind < 20:
            return f"log.append({self.expression()})"
        if kind < 29:
            return f"x = x * 2 + {self.expression()}"
        if kind < 31:
            return f"bad({self.expression()})"
        if kind < 33:
            return f"{self.name()} += {self.expression()}"
        if kind < 34:
            return f"del {self.name()}"
        if kind < 37:
            return f"log += [bad(*[{self.expression()}])]"
        if kind < 39 and looping:
            return pick(self.choices, ("break", "continue"))
        if kind < 41:
            return f"return x, log, {self.name()}"
        if kind < 43:
            return f"raise {pick(self.choices, ('ValueError', 'KeyError'))}({self.expression()})"
        return f"if {self.expression()} > 2: x = x + 1"

    def statement(self, depth: int, looping: bool) -> list[str]:
        self.left -= 1
        kind, margin = self.percent(), "    " * depth
        if depth > DEEPEST or self.left < 0:
            kind = kind * 45 // 100
        if kind < 45:
            return [margin + self.simple(kind, looping)]
        if kind < 62:
            over = pick(self.choices, ("(1, 0, 2)", "range(3)", "[4, 2, 1]", "list(log)[:3]"))
            lines = [f"{margin}for {self.name()} in {over}:", *self.block(depth + 1, True)]
            return [*lines, f"{margin}else:", *self.block(depth + 1, looping)] if self.percent() < 20 else lines
        if kind < 85:
            return self.handled(depth, looping)
        if kind < 95:
            head = f"{margin}with Context(log, {pick(self.choices, (False, True))}) as {self.name()}:"
            return [head, *self.block(depth + 1, looping)]
        self.counters += 1
        iteration = f"w{self.counters}"
        head = [f"{margin}{iteration} = 0", f"{margin}while {iteration} < 3:", f"{margin}    {iteration} += 1"]
        return [*head, *self.block(depth + 1, True)]

    def handled(self, depth: int, looping: bool) -> list[str]:
        margin, kind = "    " * depth, self.percent()
        lines = [f"{margin}try:", *self.block(depth + 1, looping)]
        if kind < 75:
            caught = ("TypeError", "(TypeError, NameError)", "UnboundLocalError", "Exception", "ValueError")
            named = f" as {self.name()}" if self.percent() < 50 else ""
            lines += [f"{margin}except {pick(self.choices, caught)}{named}:", *self.block(depth + 1, looping)]
            if self.percent() < 20:
                lines += [f"{margin}else:", *self.block(depth + 1, looping)]
        if kind >= 75 or self.percent() < 20:
            lines += [f"{margin}finally:", *self.block(depth + 1, False)]
        return lines

    def block(self, depth: int, looping: bool) -> list[str]:
        return [line for _ in range(1 + self.choices.below(3)) for line in self.statement(depth, looping)]

    def program(self) -> str:
        lines = ["def step(x):", "    log = []", "    a = 1; b = 2; c = 3", "    x = x * 2"]
        if self.percent() < 30:
            lines.append("    inner = lambda: (a, c)")
        if self.percent() < 50:
            self.left = 5
            lines += [*GENERATOR.splitlines(), "    def helper(a):", "        nonlocal x", "        b = c = 0"]
            lines += [*self.block(2, False), "        x = x + 1", "        return a"]
            self.helpers, self.left = ["helper"], STATEMENTS
        for _ in range(4):
            lines += self.statement(1, False)
        return "\n".join([*lines, "    return x, log, a", ""])


def generate(choices: Choices) -> str:
    """A program that Python compiles."""
    while True:
        source = Breaks(choices).program()
        try:
            compile(source, "<program>", "exec")
        except SyntaxError:  # a `continue` in `finally` and the like
            continue
        return source


def plainly(value: Any) -> Any:
    """What a call gave, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plainly(item) for item in value]
    if isinstance(value, BaseException):
        return [type(value).__name__, str(value)]
    return value


def told(function: Any, number: int) -> Any:
    try:
        return plainly(function(torch.full((2,), float(number))))
    except Exception as error:
        return "raised", type(error).__name__, str(error), type(error.__context__).__name__


def difference(source: str) -> tuple[str, int, int]:
    """What differs between the program captured and plain, in one of some calls, or "", how many graphs, and breaks."""
    namespace = {"brk": brk, "bad": bad, "Context": Context}
    exec(compile(source, "<program>", "exec"), namespace)
    step: Any = namespace["step"]
    reset()
    captured = capture(step, backend="eager")
    for number in range(CALLS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = told(captured, number)
        plain = told(step, number)
        failed = [str(warning.message) for warning in caught if "could not capture" in str(warning.message)]
        if failed or repr(ours) != repr(plain):
            return f"call {number}: {ours} captured, {plain} plain {failed}", 0, 0
    found = stats(captured)
    return "", found.graphs, found.breaks
