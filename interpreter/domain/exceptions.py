"""Raising, matching, exception groups, with-blocks."""
from __future__ import annotations

import sys
from typing import Any

from ..tracebacks import GET_CONTEXT, GET_TRACEBACK, SET_CONTEXT, SET_TRACEBACK, add_entry
from .core import MISSING, Core, full_name, is_a, is_class, is_subtype, lookup, type_name

NO_CAUSE = object()
KEEPS_UNMATCHED = sys.version_info < (3, 12)  # a clause that matches nothing leaves the group itself, later a copy
GET_CAUSE, SET_CAUSE = BaseException.__dict__["__cause__"].__get__, BaseException.__dict__["__cause__"].__set__
TRACES_MADE_GROUPS = sys.version_info >= (3, 14)  # the one that `except*` makes of a bare exception
EXCEPTIONS_OF = BaseExceptionGroup.__dict__["exceptions"].__get__


class Exceptions(Core):
    """What raise, except, except* and with do."""

    no_cause = NO_CAUSE

    def raise_(self, frame: Any, exc: Any, cause: Any) -> None:
        """`raise exc from cause` (Python/ceval.c do_raise); cause is `no_cause` where there is none."""
        error = self.as_exception(exc)
        if error is None:
            raise TypeError("exceptions must derive from BaseException")
        if cause is not NO_CAUSE:
            reason = None
            if cause is not None:
                reason = self.as_exception(cause)
                if reason is None:
                    raise TypeError("exception causes must derive from BaseException")
            SET_CAUSE(error, reason)
        raise error

    def as_exception(self, value: Any) -> BaseException | None:
        """The exception, made by a call where `value` is a class; None where it is neither."""
        if is_class(value) and is_subtype(value, BaseException):
            made = self.call(value, [], {})
            if not is_subtype(type(made), BaseException):
                raise TypeError(
                    f"calling {value!r} should have returned an instance of BaseException, not {type(made)}"
                )
            return made
        return value if is_subtype(type(value), BaseException) else None

    def reraise(self, frame: Any, exc: BaseException, pc: int | None = None) -> None:
        """Raise again, without adding the context or this frame's traceback entry. `pc`: where it was first raised."""
        frame.reraise = frame.pc if pc is None else pc
        raise exc

    def reraise_handled(self, frame: Any) -> None:
        """A bare `raise`."""
        exc = self.machine.handled()
        if exc is None:
            raise RuntimeError("No active exception to reraise")
        self.reraise(frame, exc)

    def caught(self, kind: Any) -> tuple[Any, ...]:
        """The classes that a handler names."""
        return kind if is_a(kind, tuple) else (kind,)

    def exc_match(self, exc: BaseException, kind: Any) -> bool:
        """`except kind`; kind is a class or a tuple of classes."""
        for cls in self.caught(kind):
            if not (is_class(cls) and is_subtype(cls, BaseException)):
                raise TypeError("catching classes that do not inherit from BaseException is not allowed")
        return is_a(exc, kind)

    def exc_group_match(self, exc: Any, kind: Any) -> tuple[Any, Any]:
        """`except* kind`: (rest, match), either may be None (Python/ceval.c exception_group_match)."""
        for cls in self.caught(kind):
            if not (is_class(cls) and issubclass(cls, BaseException)):
                raise TypeError("catching classes that do not inherit from BaseException is not allowed")
            if issubclass(cls, BaseExceptionGroup):
                raise TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")
        if exc is None:
            return None, None
        if self.exc_match(exc, kind):
            if is_a(exc, BaseExceptionGroup):
                return None, exc
            group = BaseExceptionGroup("", (exc,))
            if TRACES_MADE_GROUPS and self.machine.frame is not None:
                SET_TRACEBACK(group, add_entry(self.machine.frame, None, False))
            return None, group
        if is_a(exc, BaseExceptionGroup):
            pair = self.call(self.get_attr(exc, "split"), [kind], {})
            if not is_a(pair, tuple):
                raise TypeError(f"{type_name(type(exc))}.split must return a tuple, not {type_name(type(pair))}")
            if len(pair) < 2:
                raise TypeError(
                    f"{type_name(type(exc))}.split must return a 2-tuple, got tuple of size {len(pair)}"
                )
            return (exc if KEEPS_UNMATCHED and pair[0] is None else pair[1]), pair[0]
        return exc, None

    def prep_reraise_star(self, original: BaseException, raised: list[Any]) -> Any:
        """What is left to raise after except* clauses (Objects/exceptions.c _PyExc_PrepReraiseStar)."""
        if not raised:
            return None
        if not is_a(original, BaseExceptionGroup):
            return raised[0]
        anew: list[BaseException] = []
        again: list[BaseException] = []
        for exc in raised:
            if exc is not None:
                (again if same_metadata(exc, original) else anew).append(exc)
        kept = self.project(original, again) if again else None
        if not anew:
            return kept
        if kept is not None:
            anew.append(kept)
        return anew[0] if len(anew) == 1 else BaseExceptionGroup("", anew)

    def project(self, group: BaseException, kept: list[BaseException]) -> BaseException | None:
        """The part of `group` whose leaves stand in the `kept` groups, in the group's own nesting."""
        return self.split_by_leaf(group, {id(leaf) for exc in kept for leaf in iterate_leaves(exc)})

    def split_by_leaf(self, group: Any, leaves: set[int]) -> BaseException | None:
        parts = []
        for exc in EXCEPTIONS_OF(group):
            if is_a(exc, BaseExceptionGroup):
                inner = self.split_by_leaf(exc, leaves)
                if inner is not None:
                    parts.append(inner)
            elif id(exc) in leaves:
                parts.append(exc)
        if not parts:
            return None
        made = self.call(self.get_attr(group, "derive"), [parts], {})
        if not is_a(made, BaseExceptionGroup):
            raise TypeError("derive must return an instance of BaseExceptionGroup")
        SET_TRACEBACK(made, GET_TRACEBACK(group))
        SET_CAUSE(made, GET_CAUSE(group))
        SET_CONTEXT(made, GET_CONTEXT(group))
        notes = self.native(getattr, group, "__notes__", None)
        if not is_a(notes, dict) and lookup(type(notes), "__getitem__") is not MISSING:
            made.__notes__ = self.drain(notes)  # Objects/exceptions.c copies a sequence, and leaves out anything else
        return made

    def before_with(self, manager: Any) -> tuple[Any, Any]:
        """(bound __exit__, what __enter__ returned)."""
        return self.enter(manager, "__enter__", "__exit__", "context manager")

    def enter(self, manager: Any, enter: str, leave: str, protocol: str) -> tuple[Any, Any]:
        tp = type(manager)
        enter_raw = lookup(tp, enter)
        if enter_raw is MISSING:
            raise TypeError(f"'{type_name(tp)}' object does not support the {protocol} protocol")
        leave_raw = lookup(tp, leave)
        if leave_raw is MISSING:
            raise TypeError(
                f"'{type_name(tp)}' object does not support the {protocol} protocol (missed {leave} method)"
            )
        bound_enter = self.bind_descriptor(enter_raw, manager, tp)
        bound_leave = self.bind_descriptor(leave_raw, manager, tp)
        return bound_leave, self.call(bound_enter, [], {})

    def load_special(self, manager: Any, name: str) -> Any:
        """A with-block's bound method, looked up on the type (3.14, Python/ceval.c _PyEval_LoadSpecial)."""
        tp = type(manager)
        raw = lookup(tp, name)
        if raw is MISSING:
            raise TypeError(missed_method(tp, name))
        return self.bind_descriptor(raw, manager, tp)

    def exit_with(self, leave: Any, triple: tuple[Any, ...]) -> Any:
        """Call __exit__ with the exception's type, value and traceback; an unbound one with its object before them."""
        return self.call(leave, list(triple), {})


PROTOCOLS = {
    "__enter__": ("context manager", "asynchronous context manager", "async with"),
    "__aenter__": ("asynchronous context manager", "context manager", "with"),
}
PROTOCOLS |= {"__exit__": PROTOCOLS["__enter__"], "__aexit__": PROTOCOLS["__aenter__"]}


def missed_method(tp: type, name: str) -> str:
    """Why a with-block cannot use an object of this type (3.14, Python/ceval.c _Py_SpecialMethods)."""
    protocol, other, statement = PROTOCOLS[name]
    text = f"'{full_name(tp)}' object does not support the {protocol} protocol (missed {name} method)"
    others = [special for special, words in PROTOCOLS.items() if words[0] == other]
    if any(lookup(tp, special) is MISSING for special in others):
        return text
    return f"{text} but it supports the {other} protocol. Did you mean to use '{statement}'?"


def same_metadata(first: BaseException, second: BaseException) -> bool:
    """Objects/exceptions.c is_same_exception_metadata. The field of the notes, which it compares, is never filled."""
    return (
        first.__traceback__ is second.__traceback__
        and first.__cause__ is second.__cause__
        and first.__context__ is second.__context__
    )


def iterate_leaves(exc: BaseException) -> list[BaseException]:
    if is_a(exc, BaseExceptionGroup):
        return [leaf for inner in exc.exceptions for leaf in iterate_leaves(inner)]
    return [exc]
