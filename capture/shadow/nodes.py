"""The first operator whose result differs: the captured graph node by node, against what plain Python called."""

from __future__ import annotations

import operator
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from moebius.lowering.graph import expert_loop
from moebius.lowering.values import users_place

from ..bytecode.user_code import is_library
from .compare import tensors_differ

Ran = tuple[types.CodeType, fx.GraphModule, tuple]  # what a graph was captured of, the graph, copies of its inputs


Place = tuple[str, str, int]  # under which name an operator is called, and from which line of the user's


def name_of(function: Any) -> str:
    """torch.add, Tensor.add, ``+``, ``+=``, Tensor.add_ and aten.add.Tensor are one operator under one name."""
    name = (getattr(function, "__name__", None) or str(function)).split(".")[0]
    of_python = name.startswith("__") or getattr(function, "__module__", "") == "_operator"
    name = name.strip("_")
    other_form = of_python and name[:1] in ("i", "r") and hasattr(operator, f"__{name[1:]}__")
    return name[1:] if other_form else name


def kept(value: Any) -> Any:
    """The numbers as they are now: a later operator may write to them."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def outcome_of(result: Any, args: tuple) -> list[Any]:
    """What an operator gave, as it is now; what it wrote into, where it gives nothing (``x[0] = 1``)."""
    results = result if isinstance(result, tuple | list) else [args[0] if result is None and args else result]
    return [kept(one) for one in results]


def users_line() -> tuple[str, int]:
    """Of the program that runs now: the innermost line that is not torch's, the standard library's or ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class Recorder(TorchFunctionMode):
    """Writes down what torch calls give, by name and line, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Place, deque[list[Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = outcome_of(result, args)
        if any(isinstance(one, torch.Tensor) for one in found):
            self.calls.setdefault((name_of(func), *users_line()), deque()).append(found)
        return result


class Walker(fx.Interpreter):
    """Runs a graph node by node and compares each result with the next one that plain Python had of that operator in
    that line; in the bodies of its loops and branches, too."""

    def __init__(self, gm: fx.GraphModule, calls: dict[Place, deque[list[Any]]]):
        super().__init__(gm)
        self.calls, self.compared = calls, 0
        self.found: tuple[str, fx.Node] | None = None

    def run_node(self, n: fx.Node) -> Any:
        if n.target is expert_loop and self.found is None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return expert_loop(self.inside(args[0]), *args[1:], **kwargs)
        result = super().run_node(n)
        if self.found or n.op not in ("call_function", "call_method"):
            return result
        name, (file, line) = name_of(n.target), users_place(n)[:2]
        expected = self.calls.get((name, file, line))
        if not expected:
            return result
        got = outcome_of(result, self.fetch_args_kwargs_from_env(n)[0])
        pairs = list(zip(got, expected.popleft(), strict=False))
        self.compared += 1
        both = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
        if different := next((said for a, b in both if (said := tensors_differ(a, b))), ""):
            self.found = f"{n.name} ({name}, {file}:{line}): {different}", n
        return result

    def inside(self, body: fx.GraphModule) -> Callable[..., Any]:
        """What runs an iteration in the same way."""

        def iteration(*inputs: Any) -> Any:
            walker = Walker(body, self.calls)
            try:
                return walker.run(*inputs)
            finally:
                self.found, self.compared = self.found or walker.found, self.compared + walker.compared

        return iteration


def first_difference(graphs: list[Ran], recorder: Recorder) -> tuple[str, tuple[types.CodeType, fx.Node] | None]:
    """In words, for the report; and which node of what code, if one can be named. graphs: those that the captured call
    ran, in order. recorder: of the plain call; what is compared is taken from it."""
    compared = 0
    for code, gm, inputs in graphs:
        walker = Walker(gm, recorder.calls)
        try:
            walker.run(*inputs)
        except Exception as error:  # the report says so; the difference itself stands
            return f"unknown: the graph cannot be run node by node ({type(error).__name__}: {error})"[:200], None
        compared += walker.compared
        if walker.found:
            text, node = walker.found
            return text, (code, node)
    none = f"none of the {compared} operators that were compared: what the backend made of the graph, or an effect"
    return none if graphs else "none: no graph ran", None
