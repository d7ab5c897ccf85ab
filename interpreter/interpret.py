"""`interpret(fn)`: a callable that behaves as fn, with the bytecode run by the machine."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .domain import Domain
from .machine import Machine

F = TypeVar("F", bound=Callable[..., Any])


def interpret(fn: F) -> F:
    """A callable that does what `fn` does, by interpretation.

    Python code that the call leads to is interpreted as well; an instruction or call that cannot be raises
    InterpreterError. Exceptions are fn's own.
    """
    if not callable(fn):
        raise TypeError(f"interpret() takes a callable, not {type(fn).__name__}")

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        machine = Machine(Domain())
        return machine.enter(fn, list(args), kwargs)

    try:
        functools.update_wrapper(interpreted, fn)
    except AttributeError:
        pass
    return interpreted  # type: ignore[return-value]
