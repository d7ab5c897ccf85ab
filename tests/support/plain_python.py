"""Holds captured calls against plain Python: a model or a function made twice from one recipe, three calls of each.

A recipe takes nothing and gives ``(step, reached)``: a function of one tensor, and the objects that it may change.
After each call everything is compared: the result or the error and the lines of its traceback, the gradients of what
requires any, standard output and error, warnings with their category, file and line, what ``reached`` holds, random
state and torch's switches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import inspect
import io
import random
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of

Step = Callable[[torch.Tensor], Any]
Recipe = Callable[[], tuple[Step, Any]]
ROWS = (3, 3, 4)
NAMES = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, types.MethodType)


def compare(recipe: Recipe, backend: str = "moebius", sizes: tuple[int, ...] = ROWS) -> Any:
    """Assert that capturing changes nothing, and that each break has a hint; gives ``stats`` of the captured step.

    sizes: the rows of each call's tensor.
    """
    return stats(compared(recipe, backend, sizes))


def breaks_of(recipe: Recipe, sizes: tuple[int, ...] = ROWS) -> list[Any]:
    """``compare``; gives the graph breaks."""
    return graph_breaks(compared(recipe, "moebius", sizes))


def compared(recipe: Recipe, backend: str, sizes: tuple[int, ...]) -> Any:
    """The captured step, after the comparison."""
    step, reached = seeded(recipe)
    want = list(calls(step, reached, sizes))
    step, reached = seeded(recipe)
    captured = capture(step, backend=backend)
    for number, (ours, plain) in enumerate(zip(calls(captured, reached, sizes), want, strict=True)):
        for key, expected in plain.items():
            assert ours[key] == expected, f"call {number}: {key}"
    assert all(b.hint for b in graph_breaks(captured))
    return captured


def graph_breaks(captured: Any) -> list[Any]:
    """All graph breaks of what was captured so far."""
    owner = captured_of(captured)
    assert owner is not None
    return [s.graph_break for member in owner.family() for s in member.segments if s.graph_break is not None]


def seeded(recipe: Recipe) -> tuple[Step, Any]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    return recipe()


def calls(step: Step, reached: Any, sizes: tuple[int, ...] = ROWS) -> Iterator[dict[str, Any]]:
    """What each call did."""
    for module in list(sys.modules.values()):  # what was warned of once is new to this run
        vars(module).get("__warningregistry__", {}).clear()
    for number, rows in enumerate(sizes):
        x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(number)).requires_grad_()
        out, err = io.StringIO(), io.StringIO()
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            warnings.filterwarnings("default")
            warnings.filterwarnings("error", message="moebius")
            result, error = None, None
            try:
                result = step(x)
                if parts := list(differentiable(result)):
                    torch.stack([part.sum() for part in parts]).sum().backward()
            except Exception as raised:
                error = (type(raised).__name__, str(raised), users_lines(raised, step))
        yield {
            "result": shown(result),
            "error": error,
            "gradients": [None if t.grad is None else values(t.grad) for t in (x, *leaves(reached))],
            "printed": (out.getvalue(), err.getvalue()),
            "warnings": [(str(w.message), w.category, w.filename, w.lineno) for w in warned],
            "reached": shown(reached),
            "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
            "switches": (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_default_dtype(),
            ),
        }


def values(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor; a NaN is shown by its name, as it is not equal to itself."""
    numbers = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    found = numbers.as_subclass(torch.Tensor).tolist()
    unequal = numbers.is_floating_point() and bool(numbers.isnan().any())
    return (str(tensor.layout), repr(found) if unequal else found)


def users_lines(error: BaseException, step: Any) -> list[tuple[str, int]]:
    """The lines of a traceback that are in the file of the step."""
    function = inspect.unwrap(step)
    file = inspect.getfile(function if inspect.isroutine(function) else type(function))
    return [(p.name, p.lineno or 0) for p in traceback.extract_tb(error.__traceback__) if p.filename == file]


def differentiable(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a result that backward can begin at."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value.as_subclass(torch.Tensor)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from differentiable(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from differentiable(getattr(value, f.name))


def leaves(reached: Any) -> Iterator[torch.Tensor]:
    for obj in reached:
        if isinstance(obj, nn.Module):
            yield from obj.parameters()
        elif isinstance(obj, torch.Tensor) and obj.is_leaf:
            yield obj


def shown(value: Any, path: tuple[int, ...] = ()) -> Any:
    """A value all the way down, as something that compares; what is met inside of itself is a mark."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return kind, values(value), value.dtype, value.requires_grad, strides, value.is_inference()
    if value is None or isinstance(
        value, int | float | str | bytes | complex | enum.Enum | set | frozenset | BaseException
    ):
        return kind, repr(value)
    if isinstance(value, NAMES):
        return kind, getattr(value, "__qualname__", "")
    if id(value) in path or isinstance(value, torch.Generator):
        return kind
    path = (*path, id(value))
    if isinstance(value, dict):
        # (hooks are numbered by a counter of the process)
        inner: Any = [(k if isinstance(k, str) else shown(k, path), shown(v, path)) for k, v in value.items()]
    elif isinstance(value, list | tuple | collections.deque):
        inner = [shown(v, path) for v in value]
    else:
        inner = None
    own = {k: v for k, v in getattr(value, "__dict__", {}).items() if "hooks" not in k}
    slots = [n for c in type(value).__mro__ for n in slot_names(c)]
    return kind, inner, shown(own, path) if own else None, [(n, shown(getattr(value, n, None), path)) for n in slots]


def slot_names(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if not n.startswith("__"))


class Reader:
    """Shows the comparison what ``read`` gives after each call: a closure's variables, attributes of classes."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.__dict__ = Shown(read)


class Shown(dict):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def items(self) -> Any:
        return [("read", self.read())]

    def __bool__(self) -> bool:
        return True
