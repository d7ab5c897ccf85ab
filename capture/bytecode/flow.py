"""The control-flow graph of a function: which instruction every way on from another one goes through (post-dominators).

A function's ways meet at its return at the latest, ``RETURNED``. Ways that only raise are none: nothing is behind them.
"""

from __future__ import annotations

from moebius.interpreter.program import Program

from .copied_returns import RETURNS, copies
from .liveness import ways_on

RETURNED = -1  # in the place of an instruction's index


def behind(program: Program, index: int) -> list[int]:
    """What may run next, exceptions apart. Of a block that the compiler wrote more than once the last copy."""
    if program.instructions[index].opname in RETURNS:
        return [RETURNED]
    return [last_copy(program, way) for way in ways_on(program, index)]


def last_copy(program: Program, index: int) -> int:
    known = copies(program)
    while index in known:
        index = known[index]
    return index


def joins(program: Program) -> dict[int, int]:
    """For each instruction from which a return can be reached, the next one that is on all these ways.

    Cooper, Harvey, Kennedy, "A simple, fast dominance algorithm", 2001, from the return backward.
    """
    if program.joins is not None:
        return program.joins
    before: dict[int, list[int]] = {}
    for index in range(len(program.instructions)):
        for way in behind(program, index):
            before.setdefault(way, []).append(index)
    found: dict[int, int] = {RETURNED: RETURNED}
    order = {index: number for number, index in enumerate(postorder(before))}

    def common(one: int, other: int) -> int:
        while one != other:
            while order[one] < order[other]:
                one = found[one]
            while order[other] < order[one]:
                other = found[other]
        return one

    changed = True
    while changed:
        changed = False
        for index in reversed(order):
            if index == RETURNED:
                continue
            known = [way for way in behind(program, index) if way in found]
            join = known[0]
            for way in known[1:]:
                join = common(join, way)
            if found.get(index) != join:
                found[index], changed = join, True
    program.joins = found
    return found


def postorder(before: dict[int, list[int]]) -> list[int]:
    """All from which the return is reached, each after those that lead to it."""
    done: list[int] = []
    seen, pending = {RETURNED}, [(RETURNED, iter(before.get(RETURNED, ())))]
    while pending:
        index, ways = pending[-1]
        following = next((way for way in ways if way not in seen), None)
        if following is None:
            done.append(index)
            pending.pop()
        else:
            seen.add(following)
            pending.append((following, iter(before.get(following, ()))))
    return done


def side(program: Program, entry: int, end: int, around: int) -> frozenset[int] | None:
    """The instructions from an entry to where a branch's sides meet, with the handlers that are not those of the branch
    itself (``around``); None if some of them do not lead there."""
    outer, inside, met = program.handler_at(around), set[int](), False
    pending = [entry]
    while pending:
        index = pending.pop()
        if index == end or index in inside:
            met = met or index == end
            continue
        if index == RETURNED:
            return None
        inside.add(index)
        pending += behind(program, index)
        handler = program.handler_at(index)
        if handler is not None and handler != outer:
            pending.append(handler[0])
    return frozenset(inside) if met else None


def run_again_by(program: Program, jump: int) -> frozenset[int]:
    """What a jump backward has run again: from its target to itself, without ways that leave (a ``break`` whose rest of
    the function the compiler wrote there, a ``return``)."""
    first = program.instructions[jump].target
    assert first is not None
    before: dict[int, list[int]] = {}
    for index in range(first, jump):
        for way in behind(program, index):
            before.setdefault(way, []).append(index)
    inside, pending = set[int](), [jump]
    while pending:
        if (index := pending.pop()) not in inside:
            inside.add(index)
            pending += before.get(index, ())
    return frozenset(inside)
