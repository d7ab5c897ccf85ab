"""What a residual function does, read from its source: where the graph's inputs come from, what is set, what returns.

Residual code is a straight line of a few forms (``moebius.codegen.residual`` writes it). Each form that a file can
hold is read here; anything else is refused with what it was about.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import ExportError
from .values import encode
from .world import Frozen, Open, State, World, part

GETTERS = {"dict": "dict_item", "list": "list_item", "tuple": "tuple_item"}
MAKERS = {list: "list", dict: "dict"}


@dataclass(frozen=True)
class Output:
    """An output of the graph."""

    index: int


@dataclass(frozen=True)
class Local:
    """An object that the step makes."""

    index: int


class ResidualReader:
    """Reads one residual function into the JSON of a program (see docs/export.md)."""

    def __init__(self, run: Any, world: World, state: State, hints: list[str]):
        self.constants: dict[str, Any] = run.__globals__
        self.world, self.state, self.hints = world, state, hints
        self.values: dict[str, Any] = {}
        self.loads: list[Any] = []
        self.inputs: list[int] = []
        self.made: list[dict[str, Any]] = []
        self.writes: list[dict[str, Any]] = []
        self.written: dict[tuple[int, Any], Any] = {}
        self.result: Any = None
        function = ast.parse(run.residual_source).body[0]
        assert isinstance(function, ast.FunctionDef)
        parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.kwonlyargs)]
        for i, name in enumerate(parameters):
            self.values[name] = world.argument(i)
        self.block(function.body)

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

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Try(body=[call], orelse=rest):
                    self.block([call, *rest])
                    return  # what follows goes on after an error
                case ast.Assign(targets=[ast.Name(id="m_out")], value=ast.Call(args=inputs)):
                    given = [value for i in inputs for value in self.spread(i)]
                    self.inputs = [self.graph_input(v, i) for i, v in enumerate(given)]
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values[name] = self.value(value)
                case ast.Assign(targets=[ast.Attribute(value=cell, attr="cell_contents")], value=value):
                    self.write(self.value(cell), "cell_contents", self.value(value), statement)
                case ast.Expr(value=ast.Call() as call):
                    self.call(call, statement)
                case ast.Return(value=value):
                    assert value is not None
                    self.result = self.json(self.value(value), "the result")
                    return
                case _:
                    self.refuse(statement)

    def spread(self, expression: ast.expr) -> list[Any]:
        """The values of one argument of the graph's call, which may be a tuple that is spread."""
        if not isinstance(expression, ast.Starred):
            return [self.value(expression)]
        packed = self.value(expression.value)
        if not isinstance(packed, Frozen) or type(packed.obj) is not tuple:
            self.refuse(expression)
        return [Frozen(value) for value in packed.obj]

    def graph_input(self, value: Any, position: int) -> int:
        hint = self.hints[position]
        loaded = self.json(value, hint)
        if not isinstance(loaded, dict) or "load" not in loaded:
            raise ExportError(f"{hint}: the graph's input is converted before the call (experts on ranks?)")
        return loaded["load"]

    def call(self, call: ast.Call, statement: ast.stmt) -> None:
        """An effect, or a part of an object that the step makes."""
        match call:
            case ast.Call(func=ast.Attribute(value=owner, attr="extend" | "update"), args=[ast.Tuple(elts=items)]):
                made = self.value(owner)
                if isinstance(made, Local) and self.made[made.index]["make"] == "list":
                    self.made[made.index]["items"] += [self.json(self.value(i), "an item") for i in items]
                    return
                self.refuse_change(made, statement)
            case ast.Call(func=ast.Attribute(value=base, attr="__setitem__"), args=[owner, key, value]):
                kind = self.value(base)
                if isinstance(kind, Frozen) and isinstance(kind.obj, type) and issubclass(kind.obj, dict):
                    self.write(self.value(owner), self.constant_of(self.value(key)), self.value(value), statement)
                    return
                self.refuse_change(self.value(owner), statement)
            case ast.Call(func=ast.Attribute(attr="pop" | "clear"), args=[owner, *_]):
                self.refuse_change(self.value(owner), statement)
        self.refuse(statement)

    def write(self, owner: Any, key: Any, value: Any, statement: ast.stmt) -> None:
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

    def value(self, expression: ast.expr) -> Any:
        match expression:
            case ast.Constant(value=value):
                return Frozen(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return Frozen(-number)
            case ast.Name(id=name):
                if name in self.values:
                    return self.values[name]
                return Frozen(self.constants[name] if name in self.constants else self.builtin(name))
            case ast.Tuple(elts=items):
                return self.make("tuple", [self.json(self.value(i), "an item of a tuple") for i in items])
            case ast.List(elts=[]):
                return self.make("list", [])
            case ast.Subscript(value=ast.Name(id="m_out"), slice=ast.Constant(value=int() as index)):
                return Output(index)
            case ast.Attribute(value=owner, attr=name):
                return self.part(self.value(owner), "cell" if name == "cell_contents" else "attr", name, expression)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=base), attr="__getitem__"), args=[owner, key]) if (
                base in GETTERS
            ):
                return self.part(self.value(owner), GETTERS[base], self.constant_of(self.value(key)), expression)
            case ast.Call(func=ast.Name(id="m_raw_dict"), args=[owner]):
                return self.part(self.value(owner), "instance_dict", None, expression)
            case ast.Call(func=ast.Name(id=name), args=[]) if self.constants.get(name) in (dict, list):
                return self.make(MAKERS[self.constants[name]], [])
        self.refuse(expression)

    def builtin(self, name: str) -> Any:
        return self.constants["__builtins__"][name]

    def part(self, owner: Any, operation: str, key: Any, expression: ast.expr) -> Open | Frozen:
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
            return {"out": value.index}
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

    def refuse(self, node: ast.AST) -> NoReturn:
        involved = {
            getattr(self.constants[n.id], "__qualname__", type(self.constants[n.id]).__name__)
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and n.id.startswith("m_const") and n.id in self.constants
        }
        about = f" ({', '.join(sorted(involved))})" if involved else ""
        raise ExportError(
            f"the step does or returns something that a file cannot hold{about}. Return tensors, numbers and plain "
            "containers, and keep other objects out of the step"
        )

    def refuse_change(self, owner: Any, node: ast.AST) -> NoReturn:
        if isinstance(owner, Open):
            raise ExportError(f"the step changes its argument {self.world.names[owner.argument]}; return the new value")
        if isinstance(owner, Frozen):
            name = self.world.name_of(owner.obj)
            raise ExportError(
                f"the step changes {name}, a {type(owner.obj).__name__}, in a way that a file cannot hold: only "
                "setting entries of dictionaries and attributes of objects can be; return the value instead"
            )
        self.refuse(node)
