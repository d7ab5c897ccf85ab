"""Variables of a frame that a comprehension in it hides for a while (PEP 709, from 3.12 on), where inner functions use
the comprehension's variable: the frame's cell lies on the stack then, and is put back into its place.

In a continuation the frame's cells are free variables, and what puts a cell back writes a local of that name: the
frame's variable would stay the comprehension's.
"""

from __future__ import annotations

import types

from moebius.interpreter import decode

from .liveness import accesses, names_a_cell, ways_on


def hidden_later(code: types.CodeType, index: int) -> str | None:
    """A variable that some way on from ``index`` hides, and that the frame itself uses there, before or after it."""
    program, own = decode(code), frozenset(code.co_cellvars)
    begins = next((i for i, instruction in enumerate(program.instructions) if instruction.opname == "RESUME"), 0)
    if not any(instruction.opname == "MAKE_CELL" for instruction in program.instructions[begins:]):
        return None
    hidden: set[str] = set()
    used: set[str] = set()
    seen: set[tuple[int, frozenset[str]]] = set()
    work = [(index, frozenset[str]())]
    while work:
        place = i, inside = work.pop()
        if i >= len(program.instructions) or place in seen:
            continue
        seen.add(place)
        instruction = program.instructions[i]
        after = inside
        if instruction.opname == "MAKE_CELL" and i > begins:
            after |= {instruction.argval}
            hidden.add(instruction.argval)
        if names_a_cell(instruction):
            used |= (own - inside) & {instruction.argval}
        for kind, name in accesses(instruction):
            if kind == "STORE":
                after -= {name}  # it is put back
            elif instruction.opname != "LOAD_FAST_AND_CLEAR":
                used |= (own - inside) & {name}  # 3.13 loads cells for closures like this
        work += [(way, after) for way in ways_on(program, i)]
        if (handler := program.handler_at(i)) is not None:
            work.append((handler[0], inside))
    return min(hidden & used, default=None)
