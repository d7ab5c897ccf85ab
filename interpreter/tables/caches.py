"""How many cache entries follow an instruction, specialised ones included.

Private names of CPython's dis and opcode modules, read on 3.11.7, 3.12.1, 3.13.0, 3.14.8 and 3.15.0: `deoptmap`,
`_all_opmap`, `_inline_cache_entries` (a list by opcode up to 3.12, a dict by name from 3.13, frozen from 3.15) and code
objects' `_co_code_adaptive`.
"""
from __future__ import annotations

import dis
import opcode
from types import CodeType

UNKNOWN = -1  # an instrumented place: what stood there is kept elsewhere


def count_caches() -> list[int]:
    counts = [0] * 256
    entries = opcode._inline_cache_entries  # type: ignore[attr-defined]
    for name, op in dis._all_opmap.items():  # type: ignore[attr-defined]
        if op > 255:
            continue
        base = dis.deoptmap.get(name, name).removeprefix("INSTRUMENTED_")  # type: ignore[attr-defined]
        if base in ("LINE", "INSTRUCTION", "ENTER_EXECUTOR"):
            counts[op] = UNKNOWN
        else:
            counts[op] = entries[dis.opmap.get(base, 0)] if isinstance(entries, list) else entries.get(base, 0)
    return counts


CACHES = count_caches()


def ends_within_an_instruction(code: CodeType) -> bool:
    """Whether the last instruction's caches would lie past the end. CPython writes to them when co_code is read."""
    raw = code._co_code_adaptive  # type: ignore[attr-defined]
    place, end = 0, len(raw)
    while place < end:
        caches = CACHES[raw[place]]
        if caches == UNKNOWN:
            return False  # it was instrumented, so CPython has walked it before
        place += 2 + 2 * caches
    return place != end
