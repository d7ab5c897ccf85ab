"""What the parts of the residual code ask of the function that they write into."""

from __future__ import annotations

import contextvars
from typing import Any, Protocol

from ..heap.heap import Heap
from ..heap.objects import Objects
from ..values.residual_program import Expression, Residual


class Builder(Residual, Protocol):
    """``residual.Emitter``."""

    objects: Objects
    heap: Heap
    output_names: dict[int, Expression]  # by id of a value of the graph: what holds it

    def assign(self, value: Any, expression: Expression) -> Expression:
        """The name that a new object has from here on."""

    def fill_namespace(self, name: Expression, value: Any) -> None:
        """Put what a new object's instance dict holds into what is made for it."""

    def set_variable(self, variable: contextvars.ContextVar, value: Any) -> None:
        """A context variable gets a value."""
