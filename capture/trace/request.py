"""What a trace is asked for."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any


@dataclass
class Request:
    """What to capture: a function and the objects of one call.

    args, kwargs: the call's objects. n_cells: how many of the first ``args`` are the function's closure cells (resume
    functions get them as arguments). names: what reports call the arguments.
    """

    function: types.FunctionType
    args: tuple
    kwargs: dict[str, Any]
    n_cells: int = 0
    names: tuple[str, ...] = ()

    @property
    def code(self) -> types.CodeType:
        return self.function.__code__

    @property
    def name(self) -> str:
        return self.code.co_qualname
