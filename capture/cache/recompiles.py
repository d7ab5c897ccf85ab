"""Why a call is captured again: of each older capture the guard that failed, in the user's names and lines."""

from __future__ import annotations

import inspect
import itertools
import os
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moebius.interpreter import decode, is_kind

from ..bytecode.counting import goes_on, goes_on_with
from ..bytecode.user_code import is_ours
from ..guards import hints
from ..guards.program import CompiledGuards, changed_in_class, changed_key, describe_object, differs, fetch, look_up
from ..guards.recorder import Fact, describe, same_constant
from ..heap.objects import SameItems
from ..hook import ABSENT
from ..trace.provenance import LOCAL, left_on_stack, written
from ..trace.segment import Segment
from .generalize_guards import met, other_sizes, record_name

SHOWN = 3  # of the values that older captures were made for


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
    alike: dict[tuple[str, str, str], tuple[list[int], dict[str, None]]] = {}  # guard, new, place: captures, old
    for one in reversed(failed.values()):
        guard, old, new, file, line = change(one, code, args, kwargs)
        numbers, before = alike.setdefault((guard, new, f"{os.path.basename(file)}:{line}"), ([], {}))
        numbers.append(one.number)
        before[old] = None
    lines = (
        f"{captures(numbers)}: {guard} was {some(before)}, is {new} ({place})"
        for (guard, new, place), (numbers, before) in alike.items()
    )
    hint = hints.ARGUMENTS if best.fact is None else hint_of(best.fact, code, args, kwargs)
    return *change(best, code, args, kwargs), hint, tuple(lines)


def captures(numbers: list[int]) -> str:
    """``captures 9, 4``, ``captures 9 to 4``: numbers that fall."""
    if len(numbers) > 2 and numbers[0] - numbers[-1] == len(numbers) - 1:
        return f"captures {numbers[0]} to {numbers[-1]}"
    return f"capture{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def some(values: Iterable[str]) -> str:
    """The first of several values."""
    first = list(itertools.islice(values, SHOWN + 1))
    return ", ".join(first[:SHOWN]) + ", …" * (len(first) > SHOWN)


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
    now = rest[0] if kind == "dict" else met(fact, args, kwargs)
    if kind == "dict" and isinstance(key := changed_key(rest[0], rest[1]), str | int):
        name = record_name(record.source, key)
        old = absent_in(record.source) if rest[1][key] is ABSENT else describe(rest[1][key])
        new = describe_object(dict.get(rest[0], key, ABSENT))
        place = fact.places.get(key, place)
    elif kind == "class" and (attribute := changed_in_class(rest[0], rest[1])) is not None:
        name, old = f"{describe(rest[0])}.{attribute}", describe(rest[1][attribute])
        new = describe_object(look_up(rest[0], attribute))
        place = fact.places.get(attribute, place)
    elif kind == "absent" and isinstance(rest[1], str | int) and isinstance(now, dict):
        name, new = record_name(record.source, rest[1]), describe_object(dict.get(now, rest[1], ABSENT))
        old = absent_in(record.source)
    elif failed.said is not None:
        name, old, new, *asked = failed.said
        place = asked[0] if asked and asked[0] is not None else place
    elif kind in ("same", "distinct"):
        names = same_objects(fact, args, kwargs)
        name, old, new = " is ".join(names), str(kind == "same"), str(kind != "same")
    elif kind == "function":
        function, *parts = rest
        others = (one for one, then in zip(FUNCTION, parts, strict=True) if getattr(function, one) is not then)
        attribute = next(others, FUNCTION[0])
        name, old, new = f"{name}.{attribute}", "as captured", "another one"
    elif now is not ABSENT and (said := compared(name, *wanted(kind, rest), now)) is not None:
        name, old, new = said
    elif record.check == "unchanged" or kind == "is" and not record.check.startswith("is the same as"):
        old = describe(rest[-1])
    old = old.removeprefix("== ").removeprefix("is ")
    if new == old:  # two objects of one name
        new = f"another {new.removeprefix('the same ')}"
    return written(name, code), written(old, code), written(new, code), *asked_at(name, *place, code)


def same_objects(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """The names of the two places of which a guard says that they hold one object, or of the first two of several that
    do, where all are to hold different ones."""
    given, several = (*args, *kwargs.values()), itertools.combinations(fact.sources, 2)
    ones = (pair for pair in several if fact.check[0] == "same" or fetch(pair[0], given) is fetch(pair[1], given))
    return [place.name for place in next(ones, ())] or fact.record.check.partition(" are ")[0].split(", ")


FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
SIZED = (list, tuple, dict, set, frozenset, deque)


def wanted(kind: str, operands: list[Any]) -> tuple[str, Any]:
    """A check of one object, and what it is to be; that of a deque's items is one of Python's."""
    same_items = kind == "python" and is_kind(operands[0], SameItems)
    return ("contents", operands[0].items) if same_items else (kind, operands[-1])


def compared(name: str, kind: str, wanted: Any, now: Any) -> tuple[str, str, str] | None:
    """Of a failed check of an object's type or items: what of it is another one, what that was and what it is."""
    if kind == "type":
        return name, f"of type {describe(wanted)}", f"of type {describe(type(now))}"
    if kind in ("keys", "dict") and wanted is not None and is_kind(now, dict):
        return f"{name}.keys()", items_of(wanted), items_of(dict.keys(now))
    if type(now) not in SIZED or kind not in ("length", "contents"):
        return None
    before = wanted if kind == "length" else len(wanted)
    if before != len(now):
        return f"len({name})", str(before), str(len(now))
    if kind == "contents" and type(now) in (list, tuple, deque):
        index = next((i for i, pair in enumerate(zip(now, wanted, strict=True)) if not same_constant(*pair)), 0)
        return f"{name}[{index}]", describe(wanted[index]), describe_object(now[index])
    return (name, items_of(wanted), items_of(now)) if kind == "contents" else None


def items_of(items: Iterable[Any]) -> str:
    """The first items, in words."""
    first = [describe(item).removeprefix("the same ") for item in itertools.islice(items, 5)]
    return f"{{{', '.join(first[:4])}{', …' * (len(first) > 4)}}}"


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
    return file, line_that_reads(local.group(1).partition("[")[0], code) or line  # (``rest[0]``, of ``*rest``)


def line_that_reads(name: str, code: types.CodeType) -> int:
    """The first line that reads a local; of one that only lives on since a graph break, the last one before that. 0:
    there is none."""
    if lines := lines_that_read(name, code):
        return lines[0]
    while (before := goes_on_with(code)) is not None:
        code = before[0]
        if lines := lines_that_read(name, code, before[1]):
            return lines[-1]
    return 0


def lines_that_read(name: str, code: types.CodeType, until: int | None = None) -> list[int]:
    """Of the first instructions of a function, those that load the name, by line. An argument that ``**rest`` holds is
    loaded by it."""
    found, line = [], code.co_firstlineno
    if code.co_flags & inspect.CO_VARKEYWORDS and name not in (*code.co_varnames, *code.co_cellvars):
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    for instruction in decode(code).instructions[:until]:
        line = instruction.line or line
        operand = instruction.argval  # (from 3.13 on one may load two locals)
        if instruction.opname.startswith("LOAD") and name in (operand if isinstance(operand, tuple) else (operand,)):
            found.append(line)
    return found


def shown(guards: CompiledGuards, code: types.CodeType) -> Iterator[Any]:
    """The records of guards with such names, at the lines that need them. code: of the function that was captured. Of
    code of ours, which stands in for a library's, nobody needs to be told."""
    for fact in guards.facts:
        if fact.check[0] == "function" and is_ours(fact.check[1].__code__.co_filename):
            continue
        record = fact.record
        file, line = asked_at(record.source, record.file, record.line, code)
        source, check = written(record.source, code), written(record.check, code)
        yield replace(record, source=source, check=check, file=file, line=line)
