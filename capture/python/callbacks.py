"""What C code is given to call back while tracing: a function of the program's, called in the trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ..values.values import Break, type_of
from . import natives
from .parts import CallParts


class InTrace:
    """A function of the program's. An iterator that holds one may live on after the trace."""

    __slots__ = ("calls", "function")

    def __init__(self, calls: CallParts, function: Callable[..., Any] | None):
        self.calls, self.function = calls, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.calls.call(self.function, list(args), kwargs)


class Truth(InTrace):
    """A predicate: C code asks for the truth of what it gives."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        domain = self.calls.domain
        return domain.truth(super().__call__(*args, **kwargs))


class GroupKey(InTrace):
    """The key function of ``groupby``, None for the items themselves: C code compares what it gives."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = args[0] if self.function is None else super().__call__(*args, **kwargs)
        key = natives.specialised(key, self.calls.known)
        if not natives.is_plain(key, self.calls.known):
            raise Break("itertools.groupby", f"by a {type_of(key).__name__}", "group by plain keys")
        return key


def grouped(calls: CallParts, *args: Any, **kwargs: Any) -> list[Any]:
    """What ``itertools.groupby`` is given: what it goes through, and the key function."""
    try:
        iterable, key = of_groupby(*args, **kwargs)
    except TypeError:
        itertools.groupby(*args, **kwargs)  # Python's own error
        raise
    return [iterable, GroupKey(calls, key)]


def of_groupby(iterable: Any, key: Any = None) -> tuple[Any, Any]:
    return iterable, key
