"""What varies where a function is captured again and again: the place, how often, and what was met there."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.program import changed_key, describe_object
from ..guards.recorder import Fact, can_die
from ..guards.sources import INDEX, Part, Source, as_written, family, from_arguments, is_item
from ..heap.objects import SameItems
from ..heap.records import CONTAINERS
from ..heap.varying import RINGS
from ..hook import ABSENT
from ..trace.assumptions import Assumptions
from ..values.formulas import Guard, Unchanged
from .generalize_guards import found_at, met, record_name
from .interfaces import Captured
from .logs import warn

# Captures again for one place, after which its value is no longer taken for a constant. With three, a Trainer whose
# first steps each find something new was cut into pieces for good.
OFTEN = 6
GROWING = 4  # the same for a container that held something else in each call
LONGER = 2  # the same for a list that holds what it held and more: a log
TWICE = 2  # that an axis has size 1 after others, or the other way round: once is a last batch
LEFT = 3  # the same for what a graph break left: Python has computed it; for texts in a list, one for each row
COMPUTED = 2  # the same where something is known to vary, and for a container of tensors that are others, or none
FEW_WAYS = 12  # the same where there are few values (True and False at one line, in many combinations), or hits between
FAMILIAR = 3  # the same, of all items of a list together, where the function would run natively otherwise
ROUNDS = 3  # times that a function is taken in a more general way before it runs natively
STACK = ("L['m_stack", "next(L['m_stack")  # how the rest of a frame names what stood on its stack, iterators too
SHOWN = 3  # values in the message
FEW_ITEMS = 2  # a list of so many has few ways to hold a tensor or none at each place
FEW = (bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
FROM_NOW_ON = "from now on the graph ends where its value is needed"
OF_TENSORS = ("same", "type", "tensor")
Change = tuple[str, Any, bool]  # a place, what it holds now, and whether there are few ways


class Varying:
    """Of one captured callable."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int]] = Counter()  # items of one list are one place
        self.values: dict[str, deque[str]] = {}
        self.rounds = 0  # of ``leave_open``
        self.ones: Counter[tuple[str, int]] = Counter()  # axes of kinds of places: how often 1 came for more, or so

    def leave_open(self, assumptions: Assumptions, hint: str) -> str:
        """All places that have varied a few times, items of lists counted as one, are no longer taken for constants:
        the function was captured again so often that it would run natively. Returns what ``learn`` does."""
        families: Counter[str] = Counter()
        for (places, _, _), count in self.counts.items():
            families[places] += count
        told = []
        for place, values in self.values.items():
            if families[family(place)] >= FAMILIAR and place not in assumptions.varying:
                assumptions.varying[place] = f"{', '.join(values)} in the last calls", hint
                told.append(as_written(place))
        self.rounds += 1
        if not told or self.rounds > ROUNDS:  # (new places may come without an end)
            return ""
        more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        return f"{', '.join(told[:SHOWN])}{more} changed again and again; {FROM_NOW_ON}; {hint}"

    def learn(
        self, assumptions: Assumptions, fact: Fact, hint: str, served: bool, args: tuple, kwargs: dict[str, Any],
        facts: Sequence[Fact] = (),
    ) -> str:  # fmt: skip
        """Note why a capture did not fit. served: whether it had served often before. facts: what the capture had
        guarded. Returns, in words, which value is no longer taken for a constant; "" for none. (Of a log that grows
        nobody is told: it reads as a break.)

        Items of one list are one place: where six captures met other items each, no item is a constant any more."""
        record, told = fact.record, ""
        self.learn_of_ones(assumptions, args, kwargs, facts)
        if shared := shared_by_tensors(fact, args, kwargs) - assumptions.apart - assumptions.together:
            assumptions.apart |= shared
            return told
        counted: set[str] = set()
        for place, now, few in changes(fact, args, kwargs):
            values, shown = self.values.setdefault(place, deque(maxlen=SHOWN)), describe_object(now)
            few = few or (isinstance(now, int | float | str) and shown in values)  # to and fro between some
            values.append(shown)
            alike = family(place)
            key = (alike, record.file, record.line)
            self.counts[key] += alike not in counted  # (a relation may be about several items)
            counted.add(alike)
            limit = LONGER if is_longer(fact, now) else GROWING if type(now) in CONTAINERS else OFTEN
            if type(now) is str and not few and INDEX.search(place):
                limit = LEFT
            if place.startswith(STACK):
                limit = min(limit, COMPUTED if assumptions.varying else LEFT)
            if fact.check[0] in OF_TENSORS or is_or_was_tensor(fact, args, kwargs):
                limit = COMPUTED
            limit = FEW_WAYS if served or few or isinstance(now, FEW) else limit
            if self.counts[key] < limit or place in assumptions.varying:
                continue
            found = f"{', '.join(values)} in the last calls"
            for one in (place, *(other for other in places_in(facts) if other != place and family(other) == alike)):
                assumptions.varying.setdefault(one, (found, hint))
            if type(now) not in CONTAINERS:
                told = told or f"{as_written(place)} was {found} ({record.file}:{record.line}); {FROM_NOW_ON}; {hint}"
        return told


    def learn_of_ones(
        self, assumptions: Assumptions, args: tuple, kwargs: dict[str, Any], facts: Sequence[Fact]
    ) -> None:
        """Axes that had size 1 and have more, or the other way round."""
        found: set[tuple[str, int]] = set()
        for fact in facts:
            if fact.check[0] == "tensor" and fact.source is not None and is_tensor(now := met(fact, args, kwargs)):
                then, name = fact.check[2].get("shape") or (), fact.source.name
                vary = assumptions.dynamic_dims.get(name, ())
                for axis, (a, b) in enumerate(zip(then, now.shape, strict=False)):
                    if axis in vary and a != b and ((a == 1 and b > 1) or (b == 1 and a != 0)):
                        found.add((family(name), axis))
        for place, axis in found:
            self.ones[place, axis] += 1
            if self.ones[place, axis] >= TWICE:
                assumptions.thin.setdefault(place, set()).add(axis)


def tell(captured: Captured, told: str) -> None:
    """Say which value is no longer taken for a constant. Where warnings are errors it is a line of the log: advice must
    not end a capture."""
    if told:
        name, times = captured.function.__qualname__, len(captured.recompiles)
        text = f"moebius: {name} was captured again {times} times: {told}"
        try:
            warn(text)
        except Warning:
            logging.getLogger("moebius").warning(text)


def places_in(facts: Sequence[Fact]) -> Iterator[str]:
    """Names of places that facts are about."""
    for fact in facts:
        if fact.check[0] == "python":
            yield from (source.name for source, _ in numbers_of(fact.check[1]))
        elif fact.source is not None:
            yield fact.source.name


def changes(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> Iterator[Change]:
    """The places that a failed guard looks at, where what they hold may be left open."""
    kind, *rest = fact.check
    if kind == "dict":
        the_dict, entries, keys = rest
        if (key := changed_key(the_dict, entries)) is not None:
            yield from a_value(record_name(fact.record.source, key), dict.get(the_dict, key, ABSENT))
        elif keys is not None and not fact.record.source.endswith(("_hooks", ".__dict__")):  # (each call of a module)
            yield fact.record.source, the_dict, False
    elif kind == "class":
        yield from of_class(*rest[:2])
    elif kind == "python" and (numbers := numbers_of(rest[0])):
        for source, few in numbers:
            now = now_at(source, args, kwargs)
            if type(now) in CONTAINERS:
                continue
            if is_item(source) and isinstance(source, Part) and type(now) is bool:  # which predictions were right
                yield source.parent.name, now_at(source.parent, args, kwargs), False
            else:
                yield source.name, now, few
    elif fact.source is not None and (kind == "same" or is_or_was_tensor(fact, args, kwargs)):
        for container in containers_of(fact.source):
            yield container.name, now_at(container, args, kwargs), False
    elif fact.source is not None and kind in ("equal", "is", "contents", "length", "keys", "python"):
        source = outer(fact.source)
        if kind == "equal" and type(rest[1]) is bool and isinstance(source, Part) and is_item(source):
            source = source.parent  # which predictions were right
        yield from a_value(source.name, now_at(source, args, kwargs))


def is_longer(fact: Fact, now: Any) -> bool:
    """Whether a list or deque of which all items were read holds them still, in front of others."""
    predicate = fact.check[1]
    if fact.check[0] == "length" and fact.source is not None and lives_on(fact.source):
        return type(now) is list and 0 < fact.check[2] == len(now) - 1
    if type(now) not in RINGS or not (fact.check[0] == "contents" or type(predicate) is SameItems):
        return False
    then = fact.check[2] if fact.check[0] == "contents" else predicate.items
    return 0 < len(then) < len(now) and all(a is b for a, b in zip(then, now, strict=False))


def lives_on(source: Source) -> bool:
    """Whether an object holds it, or a cell, and no list or tuple that a call brings."""
    return source.static or (isinstance(source, Part) and (not is_item(source) or lives_on(source.parent)))


def numbers_of(check: Any) -> list[tuple[Source, bool]]:
    """The numbers that a relation is about, each with whether it is one of yes and no."""
    if isinstance(check, Guard):
        few = not isinstance(check, Unchanged) or type(check.expected) is bool
        return [(source, few) for source in check.sources]
    return [(source, not settled) for source, settled in getattr(check, "numbers", ())]


def containers_of(source: Source) -> Iterator[Source]:
    """The lists and tuples that a tensor is an item of, innermost first: which tensor stands where is nothing that can
    be left open, what holds them can."""
    while isinstance(source, Part) and is_item(source):
        source = source.parent
        yield source


def shared_by_tensors(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """Kinds of places that held one tensor when the step was captured, and now two; or the other way round."""
    kind, *rest = fact.check
    sources = fact.sources
    if fact.source is not None and kind in ("none_of", "is_weak") and (kind == "none_of" or is_tensor(rest[1]())):
        sources = (fact.source,)
    now = [(family(source.name), now_at(source, args, kwargs)) for source in sources]
    if not all(is_tensor(value) for _, value in now):
        return set()
    count = Counter(id(value) for _, value in now)
    return {place for place, value in now if kind != "distinct" or count[id(value)] > 1}


def is_tensor(value: Any) -> bool:
    return is_kind(value, torch.Tensor)


def is_or_was_tensor(fact: Fact, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor stands where there was none, or the other way round: the ends of episodes in a batch."""
    if fact.source is None or fact.check[0] not in (*OF_TENSORS, "equal"):
        return False
    around = now_at(fact.source.parent, args, kwargs) if isinstance(fact.source, Part) else ()
    if is_item(fact.source) and type(around) in (list, tuple) and len(around) <= FEW_ITEMS:
        return False  # few ways
    kind, _, known, *_ = fact.check
    then: Any = torch.Tensor if kind == "tensor" else type(known) if kind == "equal" else known
    now = type(now_at(fact.source, args, kwargs))
    return now is not then and (issubclass(now, torch.Tensor) or issubclass(then, torch.Tensor))


def of_class(cls: type, entries: dict[str, Any]) -> Iterator[Change]:
    """What a class holds that is no method of it."""
    for name, then in entries.items():
        owner = next((base for base in cls.__mro__ if name in base.__dict__), None)
        now = ABSENT if owner is None else owner.__dict__[name]
        plain = not callable(now) and not hasattr(type(now), "__get__") and not name.startswith("__")
        if owner is not None and now is not then and plain:
            yield from a_value(f"{owner.__qualname__}.{name}", now)


def a_value(place: str, now: Any) -> Iterator[Change]:
    """A tensor is an input of the graph, and each module has captures of its own."""
    if now is not ABSENT and not isinstance(now, torch.Tensor) and not can_die(now):
        yield place, now, False


def now_at(source: Source, args: tuple, kwargs: dict[str, Any]) -> Any:
    return found_at(from_arguments(source), args, kwargs)


def outer(source: Source) -> Source:
    """The object that a part belongs to which only Python itself reads: a function's defaults, one of them. (What a
    method is bound to is the program's own.)"""
    while isinstance(source, Part) and source.operand != "__self__":
        item = isinstance(source.parent, Part) and source.parent.operand in ("__defaults__", "__kwdefaults__")
        if not (item or source.operation == "instance_dict" or str(source.operand).startswith("__")):
            break
        source = source.parent
    return source
