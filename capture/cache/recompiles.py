"""Why a call is captured again: of each older capture the guard that failed, in the user's names and lines."""

from __future__ import annotations

import dis
import os
import types
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..bytecode.counting import goes_on
from ..guards import hints
from ..guards.program import changed_in_class, changed_key, describe_object, differs
from ..guards.recorder import Fact, describe
from ..hook import ABSENT
from ..trace.provenance import LOCAL, left_on_stack, written
from ..trace.segment import Segment
from .generalize_guards import met, other_sizes, record_name

R = TypeVar("R", bound=Any)


@dataclass
class Failed:
    """The first guard of one capture that does not hold for a call; None where the arguments alone are others. far: how
    many of its guards held before that."""

    fact: Fact | None
    found: str
    far: int
    number: int  # of the capture, from 1, the oldest
    call: tuple[str, str] = ("", "")  # the arguments that it was made for, and those of the call
    said: tuple[Any, ...] | None = None  # see ``guards.program.differs``


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
        if fact is not None or found:
            far = 0 if fact is None else segment.guards.facts.index(fact)
            said = None if fact is None else differs(fact, args, kwargs)
            calls = in_words(*segment.call), in_words(len(args), tuple(kwargs))
            made[id(segment)] = Failed(fact, found, far, number, calls, said)
    return made


def in_words(positional: int, names: tuple[str, ...]) -> str:
    """How a call gives its arguments: ``4 arguments, flags=…``."""
    return ", ".join([f"{positional} argument{'s' * (positional != 1)}", *(f"{name}=…" for name in names)])


def told(
    failed: dict[int, Failed], code: types.CodeType, args: tuple, kwargs: dict[str, Any]
) -> tuple[str, str, str, str, int, str, tuple[str, ...]]:
    """What a ``Recompile`` says. The guard is that of the capture that fitted best: whose guards held the longest, of
    equals the newest. Of the others there is a line for each guard."""
    best = max(reversed(failed.values()), key=lambda one: one.far)
    numbers: dict[str, list[str]] = {}
    for one in reversed(failed.values()):
        guard, old, new, file, line = change(one, code, args, kwargs)
        text = f"{guard} was {old}, is {new} ({os.path.basename(file)}:{line})"
        numbers.setdefault(text, []).append(str(one.number))
    lines = (f"capture{'s' * (len(which) > 1)} {', '.join(which)}: {text}" for text, which in numbers.items())
    hint = hints.ARGUMENTS if best.fact is None else hint_of(best.fact, code, args, kwargs)
    return *change(best, code, args, kwargs), hint, tuple(lines)


def other_break(before: Any, now: Any) -> tuple[str, str]:
    """Two graph breaks in words that tell them apart. now: None where there is none any more."""
    if now is not None and now.reason == before.reason:
        was, found = (f"{one.reason} at {os.path.basename(one.file)}:{one.line}" for one in (before, now))
        return was, found
    return before.reason, "none" if now is None else now.reason


def hint_of(fact: Fact, code: types.CodeType, args: tuple, kwargs: dict[str, Any]) -> str:
    now = met(fact, args, kwargs)
    sizes = other_sizes(fact, now)
    return hints.SIZES if sizes and goes_on(code) else hints.hint(fact, now, sizes)  # (no argument of the user's)


def change(
    failed: Failed, code: types.CodeType, args: tuple, kwargs: dict[str, Any]
) -> tuple[str, str, str, str, int]:
    """(guard, old, new, file, line) for people: of a dict or class the entry that changed, and who read it."""
    fact = failed.fact
    if fact is None:
        return "the form of the call", *failed.call, code.co_filename, code.co_firstlineno
    record = fact.record
    kind, *rest = fact.check
    name, old, new, place = record.source, record.check, failed.found, (record.file, record.line)
    if kind == "dict" and isinstance(key := changed_key(rest[0], rest[1]), str | int):
        name = record_name(record.source, key)
        old = absent_in(record.source) if rest[1][key] is ABSENT else describe(rest[1][key])
        new = describe_object(dict.get(rest[0], key, ABSENT))
        place = fact.places.get(key, place)
    elif kind == "class" and (attribute := changed_in_class(rest[0], rest[1])) is not None:
        now = next((vars(base)[attribute] for base in rest[0].__mro__ if attribute in vars(base)), ABSENT)
        name, old, new = f"{record.source}.{attribute}", describe(rest[1][attribute]), describe_object(now)
        place = fact.places.get(attribute, place)
    elif kind == "absent" and isinstance(rest[1], str | int) and isinstance(holder := met(fact, args, kwargs), dict):
        name, new = record_name(record.source, rest[1]), describe_object(dict.get(holder, rest[1], ABSENT))
        old = absent_in(record.source)
    elif failed.said is not None:
        name, old, new, *asked = failed.said
        place = asked[0] if asked and asked[0] is not None else place
    old = old.removeprefix("== ").removeprefix("is ")
    if new == old:  # two objects of one name
        new = f"another {new}"
    return written(name, code), written(old, code), written(new, code), *asked_at(name, *place, code)


def absent_in(source: str) -> str:
    """Of a key that a namespace did not have: an attribute may have had a value all the same, its class's."""
    return "not set on the object" if source.endswith(".__dict__") else "missing"


def asked_at(name: str, file: str, line: int, code: types.CodeType) -> tuple[str, int]:
    """The user's line that needs the place: where an argument is entered under guards, the line that reads it first;
    of what a graph break left, the line of its expression."""
    local = LOCAL.search(name)
    if local is not None and (said := left_on_stack(local.group(1), code)) is not None:
        return file, said.line
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
    source, check = written(record.source, code), written(record.check, code)
    return replace(record, source=source, check=check, file=file, line=line)
