"""``importlib.util.find_spec`` of what is not installed: libraries ask it in the midst of a step.

The original (Lib/importlib/util.py) goes through the finders under the import lock. That none finds it is an answer
under a guard that asks again; a package that is there is found by the original, which is interpreted.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind

from .originals import own
from .parts import Parts

FIND = own(importlib.util.find_spec)


def is_missing(name: str) -> bool:
    return name not in sys.modules and FIND(name) is None


class Packages:
    """What one trace asks for."""

    def __init__(self, domain: Parts):
        self.domain, self.objects, self.guards = domain, domain.objects, domain.objects.guards
        self.functions: dict[Any, Callable[..., Any]] = {FIND: self.find}

    def find(self, *args: Any, **kwargs: Any) -> Any:
        """``importlib.util.find_spec(name)``."""
        if not kwargs and len(args) == 1 and type(args[0]) is str and "." not in args[0] and self.as_found():
            (name,) = args
            if is_missing(name):
                self.objects.note("package")
                text = f"importlib.util.find_spec({name!r})"
                self.guards.answers(text, "finds nothing", (functools.partial(is_missing, name), True))
                return None
        assert is_kind(FIND, types.FunctionType)
        return self.domain.call_function(FIND, [*args], kwargs)

    def as_found(self) -> bool:
        """Whether the step has left alone what decides where packages are found."""
        deciding = (sys.modules, sys.path, sys.meta_path, sys.path_hooks, vars(sys))
        records = (self.objects.record_of(place) for place in deciding)
        return not any(record is not None and record.changed for record in records)
