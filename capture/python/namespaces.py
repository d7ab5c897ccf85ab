"""Builtins that look at the variables of who calls them: locals(), vars(), dir(), eval(), exec(), globals().

C code would look at the frame that runs natively, which is ours. Here they look at the interpreted one; what eval() and
exec() are given as text is interpreted in its namespaces.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import CodeType
from typing import Any

from moebius.interpreter.forms import FORMS
from moebius.interpreter.frame import Frame

from ..hook import ABSENT
from ..values.values import Break
from .parts import CallParts, Parts


class Namespaces:
    """Those of one trace. functions: what stands in for each builtin."""

    def __init__(self, domain: Parts, calls: CallParts):
        self.domain, self.objects, self.calls = domain, domain.objects, calls
        self.functions: dict[Any, Callable[..., Any]] = {
            builtins.locals: lambda: self.frame().namespace(),
            builtins.globals: self.globals,
            builtins.vars: self.variables,
            builtins.dir: self.names,
            builtins.eval: lambda *args, **named: self.run(builtins.eval, args, named),
            builtins.exec: lambda *args, **named: self.run(builtins.exec, args, named),
        }

    def frame(self) -> Frame:
        frame = self.domain.frame
        assert frame is not None
        return frame

    def globals(self) -> Any:
        frame = self.frame()
        self.domain.globals_record(frame.globals)
        return frame.globals

    def variables(self, obj: Any = ABSENT) -> Any:
        if obj is ABSENT:
            return self.frame().namespace()
        try:
            return self.domain.attributes.get(obj, "__dict__")
        except AttributeError as error:
            self.domain.machine.swallow(error)
        raise TypeError("vars() argument must have __dict__ attribute")

    def names(self, *args: Any) -> Any:
        if args:
            return self.calls.native(builtins.dir, list(args), {})
        return self.objects.made(sorted(self.frame().namespace()))

    def run(self, function: Callable[..., Any], args: tuple, named: dict[str, Any]) -> Any:
        """eval() or exec() of a text or code that is the same in each call (a guard sees to that) in the caller's
        namespaces. Given ones are a break."""
        given = [*args[1:], *named.values()]
        if any(value is not None for value in given):
            raise Break(
                f"{function.__name__}() in namespaces of its own", "a dictionary is given", "call a function instead")
        if len(args) != 1 or type(args[0]) not in (str, CodeType):
            return self.calls.native(function, list(args), named)
        self.globals()  # what it reads there is guarded from here on
        return FORMS[id(function)](self.domain, list(args), {})
