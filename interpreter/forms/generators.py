"""Methods and attributes of generators that would look at the shell instead of the interpreted frame."""
from __future__ import annotations

from types import CoroutineType, GeneratorType, TracebackType
from typing import Any

from ..domain.core import MISSING, is_a, is_class, is_subtype, lookup
from ..sentinels import UNSET
from ..shells import frame_of
from .registry import method_form


class Unraised(BaseException):
    """Stands for what is no exception on its way to what a generator delegates to: only that one may refuse it."""


def is_exception(value: Any) -> bool:
    return is_a(value, BaseException) or is_class(value) and is_subtype(value, BaseException)


def delegates_throw(domain: Any, frame: Any) -> bool:
    receiver = domain.machine.delegate(frame)
    return receiver is not UNSET and lookup(type(receiver), "throw") is not MISSING


def refused(kind: Any, value: Any = None, trace: Any = None) -> bool:
    """Whether throw() raises TypeError instead of its arguments, which it does in the innermost generator."""
    if not is_exception(kind) or not (trace is None or is_a(trace, TracebackType)):
        return True
    return is_a(kind, BaseException) and value is not None


def throw_form(kind: Any) -> None:
    """throw(): what is delegated to gets the arguments as they were given."""

    @method_form(kind, "throw")
    def throw(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        frame = frame_of(args[0]) if args and type(args[0]) is kind else None
        if frame is None:
            finished = args and type(args[0]) is GeneratorType and args[0].gi_frame is None
            try:
                return domain.native(kind.throw, *args, **kwargs)
            except BaseException as error:
                if finished:  # it raises what it is given as it is: with no new context
                    domain.machine.propagating, domain.machine.clean = error, None
                raise
        frame.thrown_args = args[1:]
        if len(args) > 1 and refused(*args[1:4]) and delegates_throw(domain, frame):
            args = [args[0], Unraised()]
        try:
            return domain.native(kind.throw, *args, **kwargs)
        finally:
            frame.thrown_args = None


throw_form(GeneratorType)
throw_form(CoroutineType)
