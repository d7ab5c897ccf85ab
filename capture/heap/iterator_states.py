"""What an iterator in C says of its state, and another one like it is given, without the warning that this ends.

From 3.12 on ``__reduce__`` and ``__setstate__`` of itertools' iterators warn (they are gone in 3.14). The user's
program asked for neither, and is to see no warning of them, nor an error where warnings are errors.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind

WARNS = sys.version_info >= (3, 12)
TEXT = "Pickle, copy, and deepcopy support will be removed from itertools in Python 3.14."


def state_of(iterator: Any) -> Any:
    """``iterator.__reduce__()``."""
    return quietly(iterator.__reduce__)


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
