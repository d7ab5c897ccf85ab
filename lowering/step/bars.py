"""A method of a progress bar, in its place among the graph's nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bar_call(method: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., None]:
    """``method(bar, *values)``, the last ones by these names."""

    def draw(bar: Any, *values: Any) -> None:
        count = len(values) - len(names)
        method(bar, *values[:count], **dict(zip(names, values[count:], strict=True)))

    return draw
