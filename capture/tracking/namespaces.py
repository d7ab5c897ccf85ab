"""Builtins that look at the variables of who calls them: locals(), vars(), dir(), eval(), exec(), globals().

C code would look at the frame that runs natively, which is ours. Here they look at the interpreted one; what eval() and
exec() are given as text is interpreted in its namespaces.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import CellType, CodeType
from typing import TYPE_CHECKING, Any

from moebius.interpreter.forms import FORMS
from moebius.interpreter.frame import UNSET, Frame

from ..resume import is_own
from .values import Break

if TYPE_CHECKING:
    from .domain import TrackingDomain


class Namespaces:
    """Those of one trace. functions: what stands in for each builtin."""

    def __init__(self, domain: TrackingDomain):
        self.domain, self.objects = domain, domain.objects
        self.functions: dict[Any, Callable[..., Any]] = {
            builtins.locals: self.namespace,
            builtins.globals: self.globals,
            builtins.vars: self.variables,
            builtins.dir: self.names,
            builtins.eval: lambda *args, **named: self.run(builtins.eval, args, named),
            builtins.exec: lambda *args, **named: self.run(builtins.exec, args, named),
        }

    def frame(self) -> Frame:
        frame = self.domain.machine.frame
        assert frame is not None
        return frame

    def namespace(self) -> Any:
        """As Frame.namespace: up to 3.12 a function has one dict, which each call brings up to date."""
        frame = self.frame()
        if frame.names is not None:
            return frame.names
        if frame.locals_dict is None:
            frame.locals_dict = self.objects.made({})
        else:
            self.objects.touch(frame.locals_dict)
        for index, name in enumerate(frame.program.localsplus):
            value = self.variable(frame, index)
            if value is UNSET or is_own(name):
                frame.locals_dict.pop(name, None)
            else:
                frame.locals_dict[name] = value
        return frame.locals_dict

    def variable(self, frame: Frame, index: int) -> Any:
        value = frame.locals[index]
        if index in frame.program.cell_indices and type(value) is CellType:
            return self.domain.load_cell(value)
        return value

    def globals(self) -> Any:
        frame = self.frame()
        self.domain.globals_record(frame.globals)
        return frame.globals

    def variables(self, *args: Any) -> Any:
        return self.domain.calls.variables(*args) if args else self.namespace()

    def names(self, *args: Any) -> Any:
        if args:
            return self.domain.calls.native(builtins.dir, list(args), {})
        return self.objects.made(sorted(self.namespace()))

    def run(self, function: Callable[..., Any], args: tuple, named: dict[str, Any]) -> Any:
        """eval() or exec() of a text or code that is the same in each call (a guard sees to that) in the caller's
        namespaces. Given ones are a break."""
        given = [*args[1:], *named.values()]
        if any(value is not None for value in given):
            raise Break(
                f"{function.__name__}() in namespaces of its own", "a dictionary is given", "call a function instead")
        if len(args) != 1 or type(args[0]) not in (str, CodeType):
            return self.domain.calls.native(function, list(args), named)
        return FORMS[id(function)](self.domain, [args[0], self.globals(), self.namespace()], {})
