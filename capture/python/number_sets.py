"""``for e in set(index.flatten().tolist())``, sorted or not: a list of numbers that is only there for its set, and a
set that is only there to be iterated over at once. It is recognised where ``tolist()`` is called, by the instructions
that follow and by what they are going to call."""

from __future__ import annotations

from moebius.interpreter import NULL, Frame

LISTED, ELEMENTS, IN_ORDER = "the list", "its set", "its set, sorted"
FEEDS = frozenset({"PRECALL", "CACHE"})


def iterated_as(frame: Frame) -> str | None:
    """What the loop runs over that begins right behind the frame's instruction, of the list that this one returns."""
    following = (i for i in frame.program.instructions[frame.pc + 1 : frame.pc + 8] if i.opname not in FEEDS)
    # (on top stands what is left of the running call: its NULL, and from 3.13 on its callable)
    callees = (value for value in reversed(frame.stack[:-1]) if value is not NULL)
    for how, callee in ((LISTED, set), (ELEMENTS, sorted), (IN_ORDER, None)):
        instruction = next(following, None)
        if instruction is None:
            return None
        if instruction.opname == "GET_ITER":
            return how
        if instruction.opname != "CALL" or instruction.arg != 1 or next(callees, None) is not callee or callee is None:
            return None
    return None
