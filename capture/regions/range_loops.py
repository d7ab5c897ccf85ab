"""Which ``for e in range(n)`` loops are recorded as one loop node: those that go over experts.

Every such loop can be unrolled, and is when anything stands against one node: an iteration that needs e as a Python
number, Python objects that iterations change, a local of the last iteration that is read later. So the test here only
has to be cheap: it reads the bytecode of the body once, and decides nothing about what the loop computes.
"""

from __future__ import annotations

from typing import Any

from moebius.interpreter import Frame, is_kind

from ..bytecode.liveness import accesses

RANGE_ITERATOR = type(iter(range(0)))
# Calls in a body that pick one expert's rows, or add rows to a result.
PICKS_ROWS = frozenset({"where", "nonzero", "argwhere", "eq"})
ADDS_ROWS = frozenset({"index_add_", "index_add", "index_put_", "index_put", "scatter_add_", "scatter_add"})


class RangeRows:
    """The iterator of ``range(count)`` in a loop that is recorded for one iteration. key: (code, index of FOR_ITER)."""

    def __init__(self, count: int, key: tuple[Any, int]):
        self.count, self.key = count, key
        self.finished = False


def length_of(iterator: Any) -> int | None:
    """n where the iterator is that of ``range(n)`` and has not begun."""
    _, (remaining,), position = iterator.__reduce__()
    fresh = remaining.start == 0 and remaining.step == 1 and not position  # CPython 3.12 has None for the position
    return len(remaining) if fresh and len(remaining) > 1 else None


def goes_over_experts(frame: Frame) -> bool:
    """Whether the body of the loop at the frame's FOR_ITER looks like an expert's iteration."""
    instructions, head = frame.program.instructions, frame.pc
    leave = instructions[head].target
    body = instructions[head + 1 : leave]
    first = accesses(body[0]) if body else []
    if not first or first[0][0] != "STORE" or leave is None:
        return False
    row = first[0][1]
    compared = any(
        b.opname == "COMPARE_OP" and accesses(a)[-1:] == [("LOAD", row)] for a, b in zip(body, body[1:], strict=False)
    )
    nested = any(i.opname == "FOR_ITER" for i in body)
    called = names_in(body)
    if not (compared or (not nested and called & PICKS_ROWS and called & ADDS_ROWS)):
        return False
    return not leftovers(body) & first_loads(instructions[leave:])


def takes_branches(tensors: Any, open_loops: list[Any], frame: Frame) -> bool:
    """Whether a branch on data is one for the graph. With a mesh, only those of an expert's iteration: each rank has
    them, whatever its own batch says."""
    if tensors.branches or not tensors.whole_step:
        return bool(tensors.branches)
    return bool(open_loops) or is_in_loop_over_experts(frame)


def is_in_loop_over_experts(frame: Frame) -> bool:
    """Whether a loop around the frame's instruction asks for the rows of what it goes over, in whatever words."""
    instructions, here = frame.program.instructions, frame.pc
    around = (
        instructions[head + 1 : loop.target]
        for head, loop in enumerate(instructions)
        if loop.opname == "FOR_ITER" and loop.target is not None and head < here < loop.target
    )
    return any(map(asks_for_rows, around))


def asks_for_rows(body: list) -> bool:
    """Whether a loop's body has a call that picks rows, or compares something with what the loop goes over."""
    rows = {name for i in body[:3] for kind, name in accesses(i) if kind == "STORE"}  # (``for e, expert in …`` unpacks)
    pairs = zip(body, body[1:], strict=False)
    compared = any(b.opname == "COMPARE_OP" and rows & {name for _, name in accesses(a)[-1:]} for a, b in pairs)
    return compared or not names_in(body).isdisjoint(PICKS_ROWS)


def names_in(body: list) -> set[str]:
    """What instructions load by name."""
    return {i.argval for i in body if is_kind(i.argval, str) and i.opname.startswith("LOAD")}


def picks_rows(frame: Frame) -> bool:
    """Whether the body of the loop at the frame's FOR_ITER, whatever it goes over, asks where something holds."""
    instructions, head = frame.program.instructions, frame.pc
    return not names_in(instructions[head + 1 : instructions[head].target]).isdisjoint(PICKS_ROWS)


def leftovers(body: list) -> set[str]:
    """Locals that an iteration sets before it reads them: after the loop they hold what the last iteration left."""
    stored = {name for i in body for kind, name in accesses(i) if kind == "STORE"}
    return stored - first_loads(body)


def first_loads(instructions: list) -> set[str]:
    """Locals of which the first access, from top to bottom, is a read."""
    first: dict[str, str] = {}
    for instruction in instructions:
        for kind, name in accesses(instruction):
            first.setdefault(name, kind)
    return {name for name, kind in first.items() if kind == "LOAD"}
