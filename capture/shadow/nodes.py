"""The first operator whose result differs: the captured graph node by node, against what plain Python called."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .compare import tensors_differ

Ran = tuple[types.CodeType, fx.GraphModule, tuple]  # what a graph was captured of, the graph, copies of its inputs


@dataclass
class Call:
    """One call of torch's that plain Python made: under which name, and what came of it."""

    name: str
    result: Any


def name_of(function: Any) -> str:
    """torch.add, Tensor.add and aten.add.Tensor are one operator under one name."""
    name = getattr(function, "__name__", None) or str(function)
    return name.split(".")[0].strip("_").removesuffix("_").removeprefix("i" if name.startswith("__i") else "")


def kept(value: Any) -> Any:
    """The numbers as they are now: a later operator may write to them."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


class Recorder(TorchFunctionMode):
    """Writes down torch calls and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.calls.append(Call(name_of(func), kept(result)))
        return result


class Walker(fx.Interpreter):
    """Runs a graph node by node and compares each result with the next call of that name in plain Python's."""

    def __init__(self, gm: fx.GraphModule, calls: list[Call], start: int = 0):
        super().__init__(gm)
        self.calls, self.at, self.compared = calls, start, 0
        self.found: tuple[str, fx.Node] | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.found or n.op not in ("call_function", "call_method") or not isinstance(result, torch.Tensor):
            return result
        name = name_of(n.target)
        match = next((i for i in range(self.at, len(self.calls)) if self.calls[i].name == name), None)
        if match is None:
            return result
        self.at, self.compared = match + 1, self.compared + 1
        if different := tensors_differ(kept(result), self.calls[match].result):
            file, line, _ = n.meta.get("where", ("", 0, ""))
            self.found = f"{n.name} ({name}, {file}:{line}): {different}", n
        return result


def first_difference(graphs: list[Ran], calls: list[Call]) -> tuple[str, tuple[types.CodeType, fx.Node] | None]:
    """In words, for the report; and which node of what code, if one can be named. graphs: those that the captured call
    ran, in order."""
    at = compared = 0
    for code, gm, inputs in graphs:
        walker = Walker(gm, calls, at)
        try:
            walker.run(*inputs)
        except Exception as error:  # the report says so; the difference itself stands
            return f"unknown: the graph cannot be run node by node ({type(error).__name__}: {error})"[:200], None
        at, compared = walker.at, compared + walker.compared
        if walker.found:
            text, node = walker.found
            return text, (code, node)
    none = f"none of the {compared} operators that were compared: what the backend made of the graph, or an effect"
    return none if graphs else "none: no graph ran", None
