"""Special methods that a class of the user's has put in the place of C's own: ``__setattr__ = dict.__setitem__``;
whether C asks them."""

from __future__ import annotations

import collections
import functools
import types
from typing import Any

from moebius.interpreter import is_kind


def is_generic(found: Any, name: str) -> bool:
    """Whether this is what C's own types have by that name, and no method that a class has put there
    (``__setattr__ = dict.__setitem__``)."""
    return is_kind(found, types.WrapperDescriptorType) and found.__name__ == name


def is_replaced(found: Any, name: str) -> bool:
    """Whether a class has something else than a function in the place of a special method (``__getitem__ = dict.get``,
    a static method): it is bound and called."""
    if is_kind(found, types.WrapperDescriptorType | types.MethodDescriptorType):
        return found.__name__ != name
    return is_kind(found, staticmethod | classmethod | property | functools.partialmethod | functools.partial)


class Asked(collections.defaultdict):
    """Keeps nothing that is set."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


ASKED = Asked(int)
# Whether a defaultdict asks its class to set what was missing; newer Pythons put it in as dict.setdefault does.
MISSING_IS_SET = ASKED[0] == 0 and not ASKED
