"""The rest of a frame after a graph break: how it is called, and how many of them are captured."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from ..bytecode.hidden_frames import hidden
from ..codegen.continuation_code import Beginning
from ..hook import Entry
from .generalize_guards import open_numbers
from .interfaces import Captured

SAME_CONTINUATIONS = 64  # iterations of a loop with a graph break that are captured one by one
# continuations of one call, of which each goes on from the one before; then Python goes on alone
MAX_CONTINUATIONS = 8 * SAME_CONTINUATIONS


def cell_places(
    function: types.FunctionType, parent: Captured | None, beginning: Beginning | None
) -> dict[str, str]:
    """What the cells are called in places, by the variable: in a continuation, which takes them as arguments, as in the
    frame that it goes on with. So what was learnt of what they hold is known on both sides of a graph break."""
    if beginning is None or parent is None:
        return {name: f"closure {function.__qualname__}.{name}" for name in function.__code__.co_freevars}
    known = parent.cells if beginning.code.co_qualname == parent.function.__code__.co_qualname else {}
    return {name: known.get(name, f"cell L[{name!r}]") for name in beginning.state.cells}


def continuations_of(captured: Captured, code: types.CodeType) -> tuple[list[Any], int]:
    """Those with equal code among the continuations that this one goes on from, nearest first; and how many these
    are."""
    found: list[Any] = []
    depth = 0
    one: Any = captured
    while one is not None and not one.root:
        if one.function.__code__ == code:
            found.append(one)
        depth, one = depth + 1, one.parent()
    return found, depth


def earlier_continuation(captured: Captured, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What goes on with a frame's continuation for which the guards of an equal one hold, of an earlier iteration of a
    loop or of what was captured before: that continuation, which looks at them again. Where they do not (None), numbers
    and sizes that have changed since are left open in what is captured now."""
    code, globals_ = captured.function.__code__, captured.function.__globals__
    known = [ref() for ref in captured.continuations.get(code, ())]
    # Older ones alone: none goes on in another that goes on in it.
    found = [one for one in known[: known.index(captured)] if one is not None] if captured in known else []
    earlier = [one for one in reversed(found) if one.function.__globals__ is globals_][:SAME_CONTINUATIONS]
    for other in earlier:
        for segment in other.segments:
            if segment.guards.hold(args, kwargs):
                run = elsewhere(captured, other, segment.guards.program)
                captured.entry.add(segment.guards.program, run)
                return run
    if not captured.segments:
        last = next((one.segments[-1] for one in earlier if one.segments), None)
        if last is not None:
            open_numbers(captured.assumptions, last.guards, args, kwargs)
    return None


def elsewhere(captured: Captured, other: Captured, program: Any) -> Callable[..., Any]:
    """Goes on in another continuation while there is one; once it has gone with what led to it, this one is
    captured."""
    mine, theirs = weakref.ref(captured.entry), weakref.ref(other.entry)
    native = captured.plain

    @hidden
    def go_on(*args: Any) -> Any:
        found = theirs()
        if found is None and (found := mine()) is not None:
            found.remove(program)
        return native(*args) if found is None else later(found)(*args)

    return go_on


def left_behind(captured: Captured) -> None:
    """Nothing goes on any more in the continuations of what led to other graph breaks than now."""
    gone = {id(one) for child in captured.children for one in child.family()}
    for known in captured.continuations.values():
        known[:] = [ref for ref in known if id(ref()) not in gone]


def later(entry: Entry) -> Callable[..., Any]:
    """Puts off a call of the entry until the frame is left that calls this, and returns what it gets."""
    return Entry.later.__get__(entry)  # (an attribute ``later`` of the entry may be the user's)


def again(entry: weakref.ref[Entry], native: Callable[..., Any]) -> Callable[..., Any]:
    """Puts off a call of an entry from code below it: code objects are unknown to the garbage collector."""

    @hidden
    def go_on(*args: Any) -> Any:
        found = entry()
        return native(*args) if found is None else later(found)(*args)

    return go_on
