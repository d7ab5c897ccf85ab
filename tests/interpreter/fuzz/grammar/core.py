"""What the families share: decisions, the scope that code is generated for, and pools of names by kind of value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..choices import Choices

T = TypeVar("T")
Lines = list[str]

# A name tells the kind of value that it mostly holds, so that most operations on it make sense.
POOLS: dict[str, tuple[str, ...]] = {
    "int": ("i", "j"),
    "str": ("s",),
    "list": ("xs", "ys"),
    "dict": ("d",),
    "obj": ("o", "p"),
    "any": ("a", "b"),
}
KIND_OF = {name: kind for kind, names in POOLS.items() for name in names}
NAMES = tuple(KIND_OF)


@dataclass
class Signature:
    """A generated function: what calls of it need to know. `kind` is plain, generator, coroutine or asyncgen."""

    name: str
    kind: str
    required: list[str]
    optional: list[str] = field(default_factory=list)
    keyword_only: list[str] = field(default_factory=list)
    positional_only: int = 0
    var_positional: bool = False
    var_keyword: bool = False


@dataclass
class Scope:
    """The code object that statements are generated for, and what may stand in it just now."""

    kind: str  # module, function or class
    outer: Scope | None = None
    is_async: bool = False
    is_generator: bool = False
    in_loop: bool = False
    jumps: bool = True  # False inside except*: no break or continue that leaves it
    returns: bool = True  # and no return
    functions: list[Signature] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    sure: set[str] = field(default_factory=set)  # bound whatever happens: what nonlocal may name
    foreign: set[str] = field(default_factory=set)  # declared global or nonlocal

    def visible_functions(self) -> list[Signature]:
        found = list(self.functions)
        outer = self.outer
        while outer is not None:
            if outer.kind != "class":
                found += outer.functions
            outer = outer.outer
        return found

    def visible_classes(self) -> list[str]:
        found = list(self.classes)
        outer = self.outer
        while outer is not None:
            if outer.kind != "class":
                found += outer.classes
            outer = outer.outer
        return found


class Core:
    """Decisions and bookkeeping. `left` is how many statements the program may still have."""

    def __init__(self, choices: Choices, families: frozenset[str], version: tuple[int, int], size: int) -> None:
        self.choices = choices
        self.families = families
        self.version = version
        self.left = size
        self.scope = Scope("module")
        self.serial = 0
        self.walrus = True  # whether := may stand here
        self.suspends = True  # whether yield and await may stand here
        self.in_fstring = False
        self.tensors = False
        self.words = True  # whether names of keyword arguments may be of a str subclass

    # --- decisions

    def below(self, n: int) -> int:
        return self.choices.below(n) if n > 1 else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """True in so many of 100 cases; shrinks to False."""
        return self.below(100) >= 100 - percent

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one_of(self, options: Sequence[tuple[int, Callable[..., Any]]], *args: Any) -> Any:
        """Call one of the (weight, method) pairs."""
        number = self.below(sum(weight for weight, _ in options))
        for weight, method in options:
            number -= weight
            if number < 0:
                return method(*args)
        raise AssertionError("weights do not add up")

    def on(self, family: str) -> bool:
        return family in self.families

    # --- text

    def fresh(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial}"

    def indent(self, lines: Lines) -> Lines:
        return ["    " + line for block in lines for line in block.split("\n")]

    def name(self, kind: str) -> str:
        """A variable that mostly holds this kind of value."""
        return self.pick(POOLS[kind])

    # --- what other families provide

    def expr(self, kind: str, depth: int) -> str:
        raise NotImplementedError

    def block(self, depth: int, most: int = 3) -> Lines:
        raise NotImplementedError

    def target(self, depth: int) -> str:
        raise NotImplementedError

    def exception(self, depth: int) -> str:
        raise NotImplementedError

    def call_of(self, signature: Signature, depth: int) -> str:
        raise NotImplementedError

    def may_suspend(self) -> bool:
        return self.suspends and self.scope.kind == "function"
