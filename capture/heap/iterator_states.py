"""What an iterator in C says of its state, and another one like it is given, without the warning that this ends.

From 3.12 on ``__reduce__`` and ``__setstate__`` of itertools' iterators warn, and 3.14 has them no more. The user's
program asked for neither, and is to see no warning of them, nor an error where warnings are errors. Where they are
gone, some iterators tell by what they hold; the others' state stays theirs, and a break comes before them.
"""

from __future__ import annotations

import gc
import itertools
import operator
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind

from ..values.values import CannotRebuild

COUNT = re.compile(r"count\((-?\d+)(?:, (-?\d+))?\)")  # how one of whole numbers shows itself
WARNS = sys.version_info >= (3, 12)
STEPPING = frozenset(map(type, (iter([]), iter(()), iter(range(0)), reversed([])))) | {enumerate, zip, reversed}
# Iterators in C that tell, by ``__reduce__``, what they give next. (Those of a deque do not say that it has changed.)
TELLING = frozenset(
    type(iterator)
    for iterator in (
        *map(iter, ([], (), "", "\u20ac", b"", range(0), range(1 << 70), set(), OrderedDict())), reversed([]),
        *(walk(view({})) for walk in (iter, reversed) for view in (dict.keys, dict.values, dict.items)),
    )
)  # fmt: skip
TEXT = "Pickle, copy, and deepcopy support will be removed from itertools in Python 3.14."


def state_of(iterator: Any) -> Any:
    """``iterator.__reduce__()``, or what makes another one where there is none of its own."""
    kind: Any = type(iterator)
    if kind.__reduce__ is not object.__reduce__:
        return quietly(iterator.__reduce__)
    if kind is itertools.chain:  # what it traverses: its type, the iterator over what is chained, the open one
        return go_on_with, tuple(gc.get_referents(iterator)[1:])
    if kind is itertools.repeat:
        (item,) = gc.get_referents(iterator)[1:]
        endless = operator.length_hint(iterator, -1) < 0
        return kind, (item,) if endless else (item, iterator.__length_hint__())
    if kind is itertools.count and (numbers := COUNT.fullmatch(repr(iterator))) is not None:
        return kind, (int(numbers[1]), int(numbers[2] or 1))
    raise CannotRebuild(f"a {kind.__name__}, which does not tell its place, is alive across a graph break")


def cloned(iterator: Any) -> Any:
    """Another iterator at the same place, and so on within it; None for kinds that do not tell it."""
    if type(iterator) not in STEPPING:
        return None
    maker, arguments, *state = iterator.__reduce__()
    parts = [cloned(part) if hasattr(type(part), "__next__") else part for part in arguments]
    if any(part is None for part in parts):
        return None
    made = maker(*parts)
    if any(place is not None for place in state):  # (a range's says where it is by its range, from 3.12 on)
        made.__setstate__(*state)
    return made


def go_on_with(*parts: Any) -> Any:
    """A chain of an iterator over what is chained and, if it has one, the iterator that is open."""
    source, *opened = parts or ((),)
    return itertools.chain.from_iterable(itertools.chain(opened, source))


def give_state(iterator: Any, state: Any) -> None:
    """``iterator.__setstate__(state)``."""
    quietly(iterator.__setstate__, state)


def quietly(method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of an iterator's. The filters are left alone where they ignore the warning, as they do unless told
    otherwise: to change them and back makes Python show again what it shows once."""
    kind: Any = type(method.__self__)  # type: ignore[attr-defined]
    if not WARNS or getattr(itertools, kind.__name__, None) is not kind or is_ignored():
        return method(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return method(*args)


def is_ignored() -> bool:
    """What ``warn_explicit`` (Python/_warnings.c) decides for the warning, in this module."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(DeprecationWarning, category) and fits(message, TEXT) and fits(module, __name__) and line == 0:
            return action == "ignore"
    return False


def fits(pattern: Any, text: str) -> bool:
    """Whether a filter's pattern, which may be a plain string, fits (``check_matched``)."""
    if pattern is None or is_kind(pattern, str):
        return pattern is None or pattern == text
    return bool(pattern.match(text))
