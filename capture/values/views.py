"""Views of dicts that are not read: one that existed before, or of a dict that holds something else in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..heap.varying import IN_EACH_TURN
from .residual_program import Expression, Residual
from .values import Break, SymbolicObject


class View(SymbolicObject):
    """Stands for a view whose items tracing does not know: to read them is a graph break.

    made_by: gives the expression of residual code for it.
    """

    __slots__ = ("kind", "made_by")
    kind: type

    def __init__(self, kind: type, made_by: Callable[[Any], Expression]):
        self.kind, self.made_by = kind, made_by

    def iterate(self) -> NoReturn:
        self.refuse("the items", IN_EACH_TURN)

    def refuse(self, what: str, in_each_iteration: str = "") -> NoReturn:
        raise Break(
            "view that is not known",
            f"{what} of a {self.kind.__name__} that existed before, or of a dict that changes from call to call",
            "read it outside of the step, or make it in the step, from a dict that keeps its keys",
            in_each_iteration,
        )

    def expression(self, emitter: Residual) -> Expression:
        return self.made_by(emitter)
