"""The residual program, what runs around the graph on a warm call, as data. ``str`` prints Python; export reads it.

An expression is a name (a ``str``) or one of the first classes here, a statement a ``Call`` or one of the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias, Union

from ..guards.sources import Source

Expression: TypeAlias = Union[str, "Literal", "Output", "Load", "Attribute", "Item", "Call", "Build"]
Statement: TypeAlias = Union["Call", "Write", "If", "Return"]

LOADS = {
    "dict_item": "dict.__getitem__({}, {})",
    "list_item": "list.__getitem__({}, {})",
    "tuple_item": "tuple.__getitem__({}, {})",
    "instance_dict": "m_raw_dict({})",
    "attr": "{}.{.value}",
    "cell": "{}.cell_contents",
}


class Literal(NamedTuple):
    value: Any

    def __str__(self) -> str:
        return repr(self.value)


class Output(NamedTuple):
    """An output of the graph."""

    number: int

    def __str__(self) -> str:
        return f"m_out[{self.number}]"


class Load(NamedTuple):
    """A part of what was there before. operation: of a source's slot."""

    operation: str
    owner: Expression
    key: Expression

    def __str__(self) -> str:
        return LOADS[self.operation].format(self.owner, self.key)


class Attribute(NamedTuple):
    owner: Expression
    name: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


class Item(NamedTuple):
    owner: Expression
    key: Any

    def __str__(self) -> str:
        return f"{self.owner}[{self.key}]"


class Call(NamedTuple):
    function: Expression
    args: tuple[Expression, ...] = ()
    named: tuple[tuple[str, Expression], ...] = ()

    def __str__(self) -> str:
        args = [*map(str, self.args), *(f"{name}={value}" for name, value in self.named)]
        return f"{self.function}({', '.join(args)})"


class Build(NamedTuple):
    """A tuple or a list."""

    kind: str
    items: tuple[Expression, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(map(str, self.items))
        return f"[{text}]" if self.kind == "list" else f"({text},)" if len(self.items) == 1 else f"({text})"


class Write(NamedTuple):
    """A name, or a place in an object, gets a value. None: it has none any more."""

    target: Expression
    value: Expression | None

    def __str__(self) -> str:
        return f"del {self.target}" if self.value is None else f"{self.target} = {self.value}"


class If(NamedTuple):
    """What is done where the condition is not None."""

    condition: Expression
    body: tuple[Statement, ...]

    def __str__(self) -> str:
        return "\n".join([f"if {self.condition} is not None:", *indented(self.body)])


class Return(NamedTuple):
    value: Expression

    def __str__(self) -> str:
        return f"return {self.value}"


class Program(NamedTuple):
    """loads: before the graph, which is called with ``inputs``. body: after it."""

    parameters: list[str]
    loads: list[Statement]
    inputs: list[str]
    body: list[Statement]


class Residual(Protocol):
    """The residual program that is being written (``codegen.residual.Emitter``). outputs: the graph's values that it
    needs. ``value`` gives what a value of the trace is, ``constant`` the name of an object."""

    lines: list[Statement]
    outputs: list[Any]

    def value(self, value: Any) -> Expression: ...
    def values(self, values: Iterable[Any]) -> Build: ...
    def graph_value(self, value: Any) -> Expression: ...
    def constant(self, value: Any) -> str: ...
    def call(self, function: Any, *values: Any) -> Call: ...
    def load(self, source: Source) -> str: ...
    def fresh(self) -> str: ...


def tuple_of(items: Iterable[Expression]) -> Build:
    return Build("tuple", tuple(items))


def method(owner: Expression, name: str, *args: Expression) -> Call:
    """``owner.name(…)``."""
    return Call(Attribute(owner, name), args)


def indented(statements: Iterable[Any]) -> list[str]:
    """The lines of statements (of texts, too) inside of another one."""
    return [f"    {line}" for statement in statements for line in str(statement).split("\n")]
