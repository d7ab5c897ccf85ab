"""``warnings.catch_warnings`` and the functions that change which warnings are shown: nodes, in their places.

While tracing a block is really entered, and what is to be ignored is ignored: operators on fakes warn, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step.filters import blocks, enter_block, filter_call, leave_block

from ..heap.objects import Objects
from ..tensors.graphs import ELSEWHERE
from ..tensors.tensors import TensorOperations
from ..values.numbers import Number
from ..values.residual_program import Expression, Residual
from ..values.values import Break, SymbolicObject
from . import natives

HINT = "it runs natively; put the block around the step for one graph"


class WarningsBlock:
    """What the step has for ``warnings.catch_warnings(action=…)``."""

    def __init__(self, record: Any, action: Any, category: Any, lineno: Any, append: Any):
        self.record, self.filter = record, (action, category, lineno, append)

    def __enter__(self) -> Any:
        recorded = enter_block(self.record)
        if self.filter[0] is not None:
            warnings.simplefilter(*self.filter)
        return recorded

    def __exit__(self, *exc: Any) -> None:
        leave_block()


def warnings_block(
    *, record: Any = False, module: Any = None, action: Any = None, category: Any = Warning, lineno: Any = 0,
    append: Any = False,
) -> Any:  # fmt: skip
    """``warnings.catch_warnings``; interpreted."""
    if module is not None:
        refuse_module()
    return WarningsBlock(bool(record), action, category, lineno, append)


def refuse_module() -> None:
    """A graph break, while tracing."""


class Recorded(SymbolicObject):
    """The list in which a block keeps the warnings: what is in it only the running step knows."""

    __slots__ = ("number",)
    kind = list

    def __init__(self, number: Number):
        self.number = number

    def refuse(self, what: str) -> NoReturn:
        raise Break("warnings that were recorded", f"{what} of the list is read", "read it after the step")

    def expression(self, emitter: Residual) -> Expression:
        return emitter.graph_value(self.number)


class Filters:
    """Those of one trace. open: blocks that it has entered; left: those that were open before and are left in it."""

    def __init__(self, objects: Objects, tensors: TensorOperations):
        self.open = self.left = 0
        self.objects, self.tensors, self.writer = objects, tensors, tensors.writer
        self.heap = objects.heap
        self.functions: dict[Any, Callable[..., Any]] = {
            refuse_module: self.refuse,
            enter_block: self.enter,
            leave_block: self.leave,
            **{
                function: functools.partial(self.change, function)
                for function in (warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings)
            },
        }

    def refuse(self) -> None:
        raise Break("warnings.catch_warnings", "of another module", HINT)

    def mark(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        if not self.tensors.runs_once:
            raise Break("warnings.catch_warnings", ELSEWHERE, HINT)
        self.objects.note("warning")
        return self.writer.call(function, *args)

    def enter(self, record: bool) -> Any:
        node = self.mark(enter_block, *([True] if record else []))
        enter_block(record)
        self.open += 1
        return self.objects.made(Recorded(Number(self.tensors.numbers, 0.5, node))) if record else None

    def leave(self) -> None:
        if not self.open and len(blocks()) == self.left:
            raise Break("warnings.catch_warnings", "that was entered elsewhere", HINT)
        self.mark(leave_block)
        if self.open:
            self.open -= 1
            leave_block()
        else:
            self.left += 1

    def change(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        values = (*args, *kwargs.values())
        if not all(natives.is_plain(v, self.objects.is_known) or is_kind(v, type) for v in values):
            raise Break(f"warnings.{function.__name__}", "with arguments that are not plain", HINT)
        self.mark(filter_call(function, *args, **kwargs))
        if not self.open:  # (what a block changes is over with it)
            self.heap.write(warnings.filters)
        if self.open and "ignore" in (*args[:1], kwargs.get("action")):
            function(*args, **kwargs)
