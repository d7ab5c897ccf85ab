"""Why a call is captured again: of each older capture the guard that failed, in the user's names and lines."""

from __future__ import annotations

import dis
import os
import re
import types
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..guards import hints
from ..guards.program import changed_in_class, changed_key, describe_object
from ..guards.recorder import Fact, describe
from ..guards.sources import for_people
from ..hook import ABSENT
from ..trace.segment import Segment
from .generalize_guards import met, other_sizes, record_name

LOCAL = re.compile(r"L\['(\w+)'\]")
R = TypeVar("R", bound=Any)


@dataclass
class Failed:
    """The first guard of one capture that does not hold for a call; None where the arguments alone are others. far: how
    many of its guards held before that, 0 to 1."""

    fact: Fact | None
    found: str
    far: float
    number: int  # of the capture, from 1, the oldest


def latest_reason(recompiles: list[Any]) -> tuple[str, str]:
    """What to do about the latest one; and the same with what kept changing."""
    if not recompiles:
        return ("keep what changes out of the step",) * 2
    last = recompiles[-1]
    return last.hint, f"{last.guard} keeps changing ({last.old} → {last.new}, {last.file}:{last.line}); {last.hint}"


def failures(segments: list[Segment], args: tuple, kwargs: dict[str, Any]) -> dict[int, Failed]:
    """By the id of a segment."""
    made = {}
    for number, segment in enumerate(segments, 1):
        fact, found = segment.guards.failure(args, kwargs)
        facts = segment.guards.facts
        if fact is not None or found:
            made[id(segment)] = Failed(fact, found, 0.0 if fact is None else facts.index(fact) / len(facts), number)
    return made


def told(
    failed: dict[int, Failed], code: types.CodeType, args: tuple, kwargs: dict[str, Any]
) -> tuple[str, str, str, str, int, str, tuple[str, ...]]:
    """What a ``Recompile`` says. Its guard is that of the capture that fitted best: whose guards held the longest, of
    equals the newest; the others are told of in one line each."""
    best = max(reversed(failed.values()), key=lambda one: one.far)
    lines = []
    for one in reversed(failed.values()):
        guard, old, new, file, line = change(one, code)
        lines.append(f"capture {one.number}: {guard} was {old}, is {new} ({os.path.basename(file)}:{line})")
    hint = hints.ARGUMENTS if best.fact is None else hint_of(best.fact, args, kwargs)
    return *change(best, code), hint, tuple(lines)


def hint_of(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> str:
    now = met(fact, args, kwargs)
    return hints.hint(fact, now, other_sizes(fact, now))


def change(failed: Failed, code: types.CodeType) -> tuple[str, str, str, str, int]:
    """(guard, old, new, file, line) for people: of a dict or class the entry that changed, and who read it."""
    fact = failed.fact
    if fact is None:
        return "arguments", "as before", failed.found, code.co_filename, code.co_firstlineno
    record = fact.record
    kind, *rest = fact.check
    name, old, new, place = record.source, record.check, failed.found, (record.file, record.line)
    if kind == "dict" and isinstance(key := changed_key(rest[0], rest[1]), str | int):
        name = record_name(record.source, key)
        old, new = describe(rest[1][key]), describe_object(dict.get(rest[0], key, ABSENT))
        place = fact.places.get(key, place)
    elif kind == "class" and (attribute := changed_in_class(rest[0], rest[1])) is not None:
        now = next((vars(base)[attribute] for base in rest[0].__mro__ if attribute in vars(base)), ABSENT)
        name, old, new = f"{record.source}.{attribute}", describe(rest[1][attribute]), describe_object(now)
        place = fact.places.get(attribute, place)
    old = old.removeprefix("== ").removeprefix("is ")
    if new == old:  # two objects of one name
        new = f"another {new}"
    return for_people(name), for_people(old), for_people(new), *asked_at(name, *place, code)


def asked_at(name: str, file: str, line: int, code: types.CodeType) -> tuple[str, int]:
    """The user's line that needs the place: where an argument is entered under guards, the line that reads it first."""
    local = LOCAL.match(name)
    if local is None or (file, line) != (code.co_filename, code.co_firstlineno):
        return file, line
    last = line
    for instruction in dis.get_instructions(code):
        last = instruction.positions.lineno or last if instruction.positions else last
        if instruction.opname.startswith("LOAD") and local.group(1) in named_by(instruction.argval):
            return file, last
    return file, line


def named_by(operand: Any) -> tuple[Any, ...]:
    """The names in an instruction's operand (from 3.13 on one may load two locals)."""
    return operand if isinstance(operand, tuple) else (operand,)


def shown(record: R, code: types.CodeType) -> R:
    """A guard's record with such names, at the line that needs it. code: of the function that was captured."""
    file, line = asked_at(record.source, record.file, record.line, code)
    source, check = for_people(record.source), for_people(record.check)
    return replace(record, source=source, check=check, file=file, line=line)
