"""What in a loop over experts kept it from being one node: the line that a refusal names.

Such a loop is unrolled, and lowering sees E iterations in a row. What it finds there (a branch between two of them) is
what unrolling left, not what stands in the way.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Protocol

from moebius.interpreter import decode
from moebius.lowering import DIFFERENT, ExpertRegion

TEXT = "text in a loop or branch"  # a list has its modules by one: what is unrolled for that is a loop of experts
Loop = tuple[types.CodeType, int]  # the code, and the index of its FOR_ITER


class Stop(Protocol):
    """What is read of a graph break."""

    reason: str
    detail: str
    hint: str
    file: str
    line: int
    stack: tuple[tuple[str, int, str], ...]


def lines_of(loop: Loop) -> range:
    """The lines of the loop, from its ``for`` to the last of its body."""
    code, index = loop
    instructions = decode(code).instructions
    first, end = instructions[index].line or code.co_firstlineno, instructions[index].target or len(instructions)
    return range(first, max([i.line for i in instructions[index:end] if i.line is not None], default=first) + 1)


def blocked(loops: Iterable[Loop], stopped: Stop | None, known: Mapping[Loop, Stop] = {}) -> dict[Loop, Stop]:
    """Of the loops that are unrolled for a graph break: those that it stands in. known: what stood there before."""
    if stopped is None:
        return {}
    places = {(file, line) for file, line, _ in stopped.stack} | {(stopped.file, stopped.line)}
    inside = [loop for loop in loops if any((loop[0].co_filename, line) in places for line in lines_of(loop))]
    return {loop: known.get(loop, stopped) for loop in inside}


def name_blockers(regions: list[ExpertRegion], known: Mapping[Loop, Stop], split: Mapping[Loop, Stop]) -> None:
    """Give each region that is refused for what stands between its iterations the loop's own place, and the line that
    blocks it. A proof that failed in the iterations says by itself where, and stands for the loop alone; but not where
    a graph break splits the loop, of which it has seen a part. known: loops unrolled for a break that is gone by that.
    """
    known = {**split, **known}  # (of a loop over hits, what stood in the way of its iterations by number)
    inside: dict[Loop, list[ExpertRegion]] = {}
    for region in regions:
        around = [loop for loop in known if region.file == loop[0].co_filename and region.line in lines_of(loop)]
        if around and not region.lowered:
            inside.setdefault(min(around, key=lambda loop: len(lines_of(loop))), []).append(region)
    for loop, found in inside.items():
        unsaid = [one for one in found if loop in split or (one.refusal or "").startswith(DIFFERENT)]
        if len(unsaid) < len(found):
            regions[:] = [region for region in regions if not any(region is one for one in unsaid)]
            continue
        stopped = known[loop]
        for region in unsaid if stopped.reason != TEXT else ():
            region.line = lines_of(loop).start
            where, region.blocker = f"{stopped.file}:{stopped.line}", stopped.stack[-1] if stopped.stack else None
            region.refusal = f"{stopped.reason}: {stopped.detail}; {stopped.hint} ({where})"
