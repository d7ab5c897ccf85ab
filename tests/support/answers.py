"""What a test of a captured function does beside plain Python: break its graph, note what a call gives, compare."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def broken(value: Any = None) -> Any:
    """A graph break, a function in C that nobody listed; gives the value."""
    sys.intern("broken")
    return value


def told(function: Callable[..., Any], *args: Any) -> Any:
    """What the call gives, or the type and text of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def shown(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """The text of what the call gives, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = function(*args)
    return repr(result), out.getvalue()


def same(ours: Any, theirs: Any) -> bool:
    """Equal to the bit and of the same types, in lists, tuples and dicts too."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(plain(ours), plain(theirs))
    if isinstance(ours, dict):
        return same(list(ours.items()), list(theirs.items()))
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(np.all(ours == theirs))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers: no subclass, not sparse, no gradients."""
    return tensor.detach().to_dense().resolve_conj().as_subclass(torch.Tensor)
