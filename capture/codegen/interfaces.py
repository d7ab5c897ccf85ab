"""What the parts of the residual code ask of the function that they write into."""

from __future__ import annotations

import contextvars
from typing import Any, Protocol

from ..guards.sources import Source
from ..heap.heap import Heap
from ..heap.interfaces import Residual
from ..heap.objects import Objects


class Builder(Residual, Protocol):
    """``residual.Emitter``."""

    objects: Objects
    heap: Heap
    output_names: dict[int, str]  # by id of a value of the graph: what holds it

    def assign(self, value: Any, expression: str) -> str:
        """The name that a new object has from here on."""

    def fill_namespace(self, name: str, value: Any) -> None:
        """Put what a new object's instance dict holds into what is made for it."""

    def set_variable(self, variable: contextvars.ContextVar, value: Any) -> None:
        """A context variable gets a value."""

    def load(self, source: Source) -> str:
        """The name that holds the object of a source."""

    def fresh(self) -> str:
        """A name that nothing has yet."""
