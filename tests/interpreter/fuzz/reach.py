"""What programs reached: opcodes, pairs of opcodes, shapes of exception tables, counted as the machine runs them."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from .compare import PROGRAM

# Opcodes that have a handler and that no compiled program executes, with the reason.
UNREACHABLE: dict[tuple[int, int], dict[str, str]] = {
    (3, 11): {
        "CACHE": "room for inline caches, never executed",
        "PRINT_EXPR": "only in code compiled with 'single', an interactive line",
        "EXTENDED_ARG": "belongs to the instruction that follows, and is folded into it",
    },
    (3, 12): {
        "CACHE": "room for inline caches, never executed",
        "EXTENDED_ARG": "belongs to the instruction that follows, and is folded into it",
    },
    (3, 13): {
        "CACHE": "room for inline caches, never executed",
        "EXTENDED_ARG": "belongs to the instruction that follows, and is folded into it",
    },
    (3, 14): {
        "CACHE": "room for inline caches, never executed",
        "EXTENDED_ARG": "belongs to the instruction that follows, and is folded into it",
        "SETUP_ANNOTATIONS": "only in code that imports annotations from __future__",
    },
    (3, 15): {
        "CACHE": "room for inline caches, never executed",
        "EXTENDED_ARG": "belongs to the instruction that follows, and is folded into it",
        "SETUP_ANNOTATIONS": "only in code that imports annotations from __future__",
    },
}


@dataclass
class Reach:
    """Counts. An exception table's shape is (depth of nesting, whether lasti is used, entries up to 8)."""

    opcodes: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    tables: Counter[tuple[int, bool, int]] = field(default_factory=Counter)
    routes: Counter[tuple[str, int, bool]] = field(
        default_factory=Counter
    )  # opcode that raised, handler's depth, lasti

    def add(self, other: Reach) -> None:
        self.opcodes.update(other.opcodes)
        self.pairs.update(other.pairs)
        self.tables.update(other.tables)
        self.routes.update(other.routes)

    def unreached(self) -> list[str]:
        """Opcodes that the compiler of this Python emits, and that no program executed."""
        from moebius.interpreter.decode import emitted_opcodes

        excused = UNREACHABLE[sys.version_info[:2]]
        return [name for name in emitted_opcodes() if name not in self.opcodes and name not in excused]

    def table(self, title: str) -> str:
        lines = [title, "", f"Opcodes: {len(self.opcodes)} executed"]
        lines += [f"  {name:32}{count:>12,}" for name, count in self.opcodes.most_common()]
        lines += ["", f"Not reached: {', '.join(self.unreached()) or 'none'}", "Cannot be reached:"]
        lines += [f"  {name:32}{reason}" for name, reason in UNREACHABLE[sys.version_info[:2]].items()]
        lines += ["", f"Pairs of opcodes: {len(self.pairs):,} executed; the rarest and the most frequent ten"]
        ranked = self.pairs.most_common()
        lines += [f"  {first + ', ' + second:64}{count:>12,}" for (first, second), count in ranked[:10] + ranked[-10:]]
        lines += ["", "Exception tables: entries that overlap, with lasti or not, entries (8: or more), code objects"]
        lines += [
            f"  {depth:>3} {'lasti' if lasti else '-':>6} {size:>3}{n:>12,}"
            for (depth, lasti, size), n in sorted(self.tables.items())
        ]
        raised = Counter[str]()
        for (name, _, _), count in self.routes.items():
            raised[name] += count
        lines += [
            "",
            f"Exceptions routed to a handler: {sum(raised.values()):,}, from {len(raised)} opcodes, "
            f"{len(self.routes)} combinations of opcode, stack depth and lasti",
        ]
        return "\n".join(lines)


def shape(code: CodeType) -> tuple[int, bool, int] | None:
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    if not entries:
        return None
    starts = [entry.target for entry in entries]
    depth = 1
    for entry in entries:  # a handler that is itself covered by another entry is nested in it
        nested, place = 1, entry
        while True:
            target = place.target
            outer = next((e for e in entries if e.start <= target < e.end and e.target > target), None)
            if outer is None or nested > 20:
                break
            nested, place = nested + 1, outer
        depth = max(depth, nested)
    assert starts
    return depth, any(entry.lasti for entry in entries), min(len(entries), 8)


@contextlib.contextmanager
def recording(reach: Reach) -> Iterator[None]:
    """Count what machines run in here. Only domains that observe are counted: it makes the concrete domain one."""
    from moebius.interpreter import Domain, Machine

    seen_codes: set[int] = set()
    kept: list[CodeType] = []
    opcodes, pairs = reach.opcodes, reach.pairs
    before = Domain.observes, Domain.observe, Machine.unwind
    last: dict[int, str] = {}

    def observe(self: Any, frame: Any) -> None:
        name = dis.opname[frame.program.instructions[frame.pc].opcode]
        opcodes[name] += 1
        key = id(frame)
        if frame.pc:
            previous = last.get(key)
            if previous is not None:
                pairs[previous, name] += 1
        else:
            code = frame.code
            if id(code) not in seen_codes:
                seen_codes.add(id(code))
                kept.append(code)  # so that its id stays its own
                found = shape(code) if code.co_filename == PROGRAM else None
                if found is not None:
                    reach.tables[found] += 1
        if len(last) > 5000:
            last.clear()
        last[key] = name

    def unwind(self: Any, frame: Any, exc: BaseException) -> bool:
        region = frame.program.handlers[frame.pc]
        if region is not None:
            reach.routes[dis.opname[frame.instruction.opcode], region[1], region[2]] += 1
        return bool(before[2](self, frame, exc))

    Domain.observes, Domain.observe, Machine.unwind = True, observe, unwind  # type: ignore[method-assign]
    try:
        yield
    finally:
        Domain.observes, Domain.observe, Machine.unwind = before  # type: ignore[method-assign]
