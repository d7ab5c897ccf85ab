"""Generator and coroutine functions under capture: they run as Python, and the functions that they call are captured.

What a suspended frame holds between two steps belongs to whoever drives it, so its own instructions are not put into
graphs; each step runs with the frame hook on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

RUNS_AS_PYTHON = "a generator or coroutine function runs as Python; the functions that it calls are captured"
Below = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_driven(function: types.FunctionType) -> bool:
    """Whether calling the function gives a generator or a coroutine."""
    return inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)


def driven(function: types.FunctionType, below: Below) -> types.FunctionType:
    """A function of the same kind whose every step runs ``below`` it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return await Awaited(function(*args, **kwargs), below)
    else:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (yield from steps(function(*args, **kwargs), below))

    return run  # type: ignore[return-value]


class Awaited:
    """A coroutine as something to await."""

    def __init__(self, coroutine: Any, below: Below):
        self.coroutine, self.below = coroutine, below

    def __await__(self) -> Generator[Any, Any, Any]:
        return steps(self.coroutine, self.below)


def steps(inner: Any, below: Below) -> Generator[Any, Any, Any]:
    """PEP 380's ``yield from inner``, each step of it through ``below``."""
    send, throw, close = below(inner.send), below(inner.throw), below(inner.close)
    try:
        item = send(None)
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                close()
                raise
            except BaseException as error:
                item = throw(error)
            else:
                item = send(sent)
    except StopIteration as stop:
        return stop.value
