"""Whether nodes do the same: equal constants, and nodes in equal places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

BY_TEXT = frozenset((int, float, str, bool, complex, torch.device))  # constants of which there are several equal ones
Places = dict[fx.Node, int]


def same_items(first: Sequence[Any], second: Sequence[Any], in_first: Places, in_second: Places, given: dict) -> bool:
    """``same`` for each of two rows of arguments."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if type(a) is fx.Node and type(b) is fx.Node:
            place = in_first.get(a)
            if place != in_second.get(b) or (place is None and given.setdefault(a, b) is not b):
                return False
        elif not same(a, b, in_first, in_second, given):
            return False
    return True


def same(a: Any, b: Any, first: Places, second: Places, given: dict[fx.Node, fx.Node]) -> bool:
    """Whether an argument of the first iteration is one of another: nodes in equal places of the two, equal constants.

    given: what the other iteration uses from outside, by what the first one uses there.
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is fx.Node:
        return same_items((a,), (b,), first, second, given)
    if isinstance(a, tuple | list):
        return same_items(a, b, first, second, given)
    if isinstance(a, dict):
        return list(a) == list(b) and same_items([*a.values()], [*b.values()], first, second, given)
    if kind is slice:
        return same_items((a.start, a.stop, a.step), (b.start, b.stop, b.step), first, second, given)
    return a is b or (kind in BY_TEXT and repr(a) == repr(b))
