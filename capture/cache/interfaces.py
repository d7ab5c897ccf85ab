"""What the parts of this room, shadow mode and export ask of a captured function."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..hook import Entry
from ..trace.assumptions import Assumptions
from ..trace.segment import Segment


class Captured(Protocol):
    """``captured.Captured``."""

    function: types.FunctionType
    options: Any
    entry: Entry
    n_cells: int
    cells: dict[str, str]
    children: list[Any]
    segments: list[Segment]
    left: list[Segment]
    continuations: dict[types.CodeType, list[weakref.ref[Any]]]
    recompiles: list[Any]
    misses: dict[str, int]
    assumptions: Assumptions

    @property
    def plain(self) -> Callable[..., Any]: ...

    def family(self) -> Iterator[Any]: ...

    def forget(self, segment: Segment) -> None: ...

    def argument_names(self, args: tuple, kwargs: dict[str, Any]) -> tuple[str, ...]: ...

    def tell_recompile(self, guard: str, old: str, new: str, file: str, line: int, hint: str) -> None: ...
