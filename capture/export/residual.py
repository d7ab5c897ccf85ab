"""A residual program for a file: where the graph's inputs come from, what is set, what returns.

Each form that a file can hold is written here; anything else is refused with what it was about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import ExportError
from ..values.residual_program import (
    Attribute,
    Build,
    Call,
    Expression,
    Literal,
    Load,
    Output,
    Return,
    Statement,
    Write,
)
from .values import encode
from .world import Frozen, Open, State, World, part


@dataclass(frozen=True)
class Local:
    """An object that the step makes."""

    index: int


class ResidualReader:
    """Writes one residual program as JSON (see docs/export.md)."""

    def __init__(self, run: Any, world: World, state: State, hints: list[str]):
        self.constants: dict[str, Any] = run.__globals__
        self.world, self.state = world, state
        self.values: dict[str, Any] = {}
        self.loads: list[Any] = []
        self.made: list[dict[str, Any]] = []
        self.writes: list[dict[str, Any]] = []
        self.written: dict[tuple[int, Any], Any] = {}
        self.result: Any = None
        residual = run.residual_program
        self.values |= {name: world.argument(i) for i, name in enumerate(residual.parameters)}
        for load in residual.loads:
            self.statement(load)
        given = zip(map(self.value, residual.inputs), hints, strict=True)
        self.inputs = [self.graph_input(value, hint) for value, hint in given]
        for statement in residual.body:
            self.statement(statement)

    def program(self) -> dict[str, Any]:
        return {
            "loads": self.loads,
            "inputs": self.inputs,
            "make": self.made,
            "writes": self.writes,
            "result": self.result,
        }

    # ------------------------------------------------------------------------------------------------------------------
    # Statements
    # ------------------------------------------------------------------------------------------------------------------

    def statement(self, statement: Statement) -> None:
        match statement:
            case Write(str(name), value) if value is not None:
                self.values[name] = self.value(value)
            case Write(Attribute(cell, "cell_contents"), value) if value is not None:
                self.write(self.value(cell), "cell_contents", self.value(value), statement)
            case Call():
                self.call(statement)
            case Return(value):
                self.result = self.json(self.value(value), "the result")
            case _:
                self.refuse(statement)

    def graph_input(self, value: Any, hint: str) -> int:
        loaded = self.json(value, hint)
        if not isinstance(loaded, dict) or "load" not in loaded:
            raise ExportError(f"{hint}: the graph's input is converted before the call (experts on ranks?)")
        return loaded["load"]

    def call(self, call: Call) -> None:
        """An effect, or a part of an object that the step makes."""
        match call:
            case Call(Attribute(owner, "extend" | "update"), (Build("tuple", items),)):
                made = self.value(owner)
                if isinstance(made, Local) and self.made[made.index]["make"] == "list":
                    self.made[made.index]["items"] += [self.json(self.value(i), "an item") for i in items]
                    return
                self.refuse_change(made, call)
            case Call(Attribute(base, "__setitem__"), (owner, key, value)):
                kind = self.value(base)
                if isinstance(kind, Frozen) and isinstance(kind.obj, type) and issubclass(kind.obj, dict):
                    self.write(self.value(owner), self.constant_of(self.value(key)), self.value(value), call)
                    return
                self.refuse_change(self.value(owner), call)
            case Call(Attribute(_, "pop" | "clear"), (owner, *_)):
                self.refuse_change(self.value(owner), call)
        self.refuse(call)

    def write(self, owner: Any, key: Any, value: Any, statement: Statement) -> None:
        if isinstance(owner, Local):
            if self.made[owner.index]["make"] != "dict":
                self.refuse(statement)
            self.made[owner.index]["items"].append([encode(key), self.json(value, f"[{key!r}]")])
            return
        if not isinstance(owner, Frozen) or not isinstance(key, str | int):
            self.refuse_change(owner, statement)
        place = (id(owner.obj), key)
        before = owner.obj.cell_contents if key == "cell_contents" else owner.obj.get(key)
        name = self.state.cell(place, owner.obj, before)
        self.written[place] = value.obj if isinstance(value, Frozen) else value
        self.writes.append({"state": name, "value": self.json(value, name)})

    # ------------------------------------------------------------------------------------------------------------------
    # Expressions
    # ------------------------------------------------------------------------------------------------------------------

    def value(self, expression: Expression) -> Any:
        match expression:
            case Literal(value):
                return Frozen(value)
            case str(name):
                if name in self.values:
                    return self.values[name]
                return Frozen(self.constants[name] if name in self.constants else self.constants["__builtins__"][name])
            case Build(kind, items):
                return self.make(kind, [self.json(self.value(i), f"an item of a {kind}") for i in items])
            case Output():
                return expression
            case Load(operation, owner, key):
                return self.part(self.value(owner), operation, self.constant_of(self.value(key)), expression)
            case Call(str(name), ()) if self.constants.get(name) is dict:
                return self.make("dict", [])
        self.refuse(expression)

    def part(self, owner: Any, operation: str, key: Any, expression: Load) -> Open | Frozen:
        if not isinstance(owner, Open | Frozen):
            self.refuse(expression)
        found = part(owner, operation, key)
        if isinstance(owner, Frozen):
            self.world.hold(owner.obj)
            if operation == "attr" and not (isinstance(owner.obj, torch.Tensor) and key == "grad"):
                self.refuse(expression)
        return found

    def make(self, kind: str, items: list[Any]) -> Local:
        self.made.append({"make": kind, "items": items})
        return Local(len(self.made) - 1)

    def constant_of(self, value: Any) -> Any:
        return value.obj if isinstance(value, Frozen) else value

    def json(self, value: Any, hint: str) -> Any:
        """The JSON of a value that the loaded step will need."""
        if isinstance(value, Output):
            return {"out": value.number}
        if isinstance(value, Local):
            return {"local": value.index}
        if isinstance(value, Open):
            return self.load({"argument": value.argument, "path": [[op, encode(key)] for op, key in value.path]})
        obj = value.obj
        if value.places:
            owner_id, key = value.places[-1]
            owner = self.world.held(owner_id)
            if isinstance(owner, torch.Tensor) and key == "grad":
                name = self.state.fix(owner, hint)
                if obj is not None:
                    self.state.has_gradient(name)
                return self.load({"gradient": name})
            return self.load({"state": self.state.cell(value.places[-1], owner, obj, hint)})
        if isinstance(obj, torch.Tensor):
            return self.load({"state": self.state.fix(obj, hint)})
        try:
            if isinstance(obj, list | dict):
                raise ExportError("it can be changed")
            return {"constant": encode(obj)}
        except ExportError:
            raise ExportError(
                f"{hint} is a {type(obj).__name__} that was there before the call; a loaded step has no such object. "
                "Return tensors, numbers and plain containers"
            ) from None

    def load(self, way: Any) -> dict[str, int]:
        if way not in self.loads:
            self.loads.append(way)
        return {"load": self.loads.index(way)}

    # ------------------------------------------------------------------------------------------------------------------
    # Refusals
    # ------------------------------------------------------------------------------------------------------------------

    def refuse(self, node: Statement | Expression) -> NoReturn:
        constants = [self.constants.get(name) for name in names_in(node) if name.startswith("m_const")]
        involved = {getattr(obj, "__qualname__", type(obj).__name__) for obj in constants}
        about = f" ({', '.join(sorted(involved))})" if involved else ""
        raise ExportError(
            f"the step does or returns something that a file cannot hold{about}. Return tensors, numbers and plain "
            "containers, and keep other objects out of the step"
        )

    def refuse_change(self, owner: Any, node: Statement) -> NoReturn:
        if isinstance(owner, Open):
            raise ExportError(f"the step changes its argument {self.world.names[owner.argument]}; return the new value")
        if isinstance(owner, Frozen):
            name = self.world.name_of(owner.obj)
            raise ExportError(
                f"the step changes {name}, a {type(owner.obj).__name__}, in a way that a file cannot hold: only "
                "setting entries of dictionaries and attributes of objects can be; return the value instead"
            )
        self.refuse(node)


def names_in(node: Any) -> Iterator[str]:
    """The names in a part of a residual program."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, tuple):
        for each in node:
            yield from names_in(each)
