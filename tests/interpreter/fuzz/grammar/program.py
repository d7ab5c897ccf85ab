"""Whole programs: the families put together, and the frame around them."""

from __future__ import annotations

import sys

from ..choices import Choices
from ..prelude import prelude_for
from .classes import Classes
from .core import NAMES, Lines, Scope
from .exceptions import Exceptions
from .expressions import Expressions
from .functions import Functions
from .library import Library
from .matching import Matching
from .statements import Statements
from .suspending import Suspending

FAMILIES = (
    "try",
    "with",
    "functions",
    "classes",
    "generators",
    "async",
    "match",
    "except_star",
    "closures",
    "walrus",
    "fstrings",
    "nesting",
    "decorators",
    "imports",
    "reflection",
    "type_parameters",
    "guarding",
    "library",
)


class Grammar(Expressions, Statements, Exceptions, Functions, Suspending, Classes, Matching, Library):
    """Generates one program from the choices it is given."""

    def nested(self) -> list[tuple[str, int, object]]:
        return [
            ("try", 4, self.try_),
            ("try", 1, self.nested_finally),
            ("with", 2, self.with_),
            ("functions", 2, self.function),
            ("functions", 2, self.call_statement),
            ("classes", 3, self.class_),
            ("generators", 3, self.generator),
            ("generators", 1, self.pipeline),
            ("async", 2, self.coroutine),
            ("async", 1, self.async_generator),
            ("match", 2, self.match_),
            ("except_star", 1, self.try_star),
            ("type_parameters", 1, self.alias),
            ("library", 3, self.library),
        ]

    def program(self) -> str:
        module: Lines = self.declare(list(NAMES))
        if self.chance(40):
            module += self.guarded(2)
        main = Scope("function", self.scope)
        outer, self.scope = self.scope, main
        lines, local = self.declarations(main, set())
        first = len(lines)
        lines += self.declare(local)
        while self.left > 0:
            lines += self.guarded(3)
        lines.append(f"return {self.tuple_display(1)}")
        lines[first:first] = self.declare_late(main, set())
        self.scope = outer
        module += ["def main():", *self.indent(lines)]
        return "\n".join(module) + "\n"

    def guarded(self, depth: int) -> Lines:
        """Statements whose exceptions are logged, so that the program goes on; some are left to end it."""
        self.left -= 1
        lines = self.block(depth, 2)
        if self.chance(10):
            return lines
        return self.caught(lines)


# What goes through @capture as well. It reads the names of classes that say what they are asked for, among others.
CAPTURED_FAMILIES = tuple(family for family in FAMILIES if family != "library")


def chosen_families(choices: Choices, families: tuple[str, ...]) -> frozenset[str]:
    """All of them, or (swarm testing, Groce et al. 2012) about half, so that what is left goes deeper."""
    if choices.below(3) == 0:
        return frozenset(families)
    return frozenset(family for family in families if choices.below(2) == 0)


def generate(
    choices: Choices,
    version: tuple[int, int] = sys.version_info[:2],
    size: int = 80,
    tensors: bool = False,
    families: tuple[str, ...] = FAMILIES,
) -> str:
    """The text of a program. It binds `main`, and expects `log` (a list) and `describe` in its namespace.

    With `tensors` some of its values are small tensors, made by a function `tensor` that it expects there as well.
    """
    grammar = Grammar(choices, chosen_families(choices, families), version, 6 + choices.below(size))
    grammar.tensors = tensors
    grammar.words = "library" in families  # a captured call passes keywords on, and their names are hashed once more
    body = grammar.program()
    return prelude_for(body) + body
