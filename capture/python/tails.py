"""The end of a list that is longer in each call: ``np.mean(losses[-100:])``, ``sum(ring) / len(ring)``.

What stands in it the running step finds: the list is an input of the graph, and what the call has added stands behind
it. It is given to functions of numbers, and told its length; anything else has to know its items.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from moebius.lowering.step.arrays import PLAIN, of_items
from moebius.lowering.step.gathered import end_of

from ..heap.records import Record
from ..heap.varying import RINGS
from ..hook import ABSENT
from ..values.numbers import Number, example
from ..values.numpy_numbers import is_numpy_function
from ..values.residual_program import Expression, Residual
from ..values.values import SYMBOLIC, Break, SymbolicObject, TensorProxy
from .parts import Parts

PYTHONS = (builtins.sum, builtins.max, builtins.min, math.fsum)  # which only compute, of plain numbers
ADDED = frozenset((*PLAIN, *SYMBOLIC, Number, TensorProxy))
HINT = "read it outside of the step: append() alone reads nothing"


class Tail(SymbolicObject):
    """Of a list or deque: ``values[-size:]``. items: them, as the graph has them."""

    items: Number

    def __init__(self, tails: Tails, record: Record, size: int):
        self.tails, self.size, self.site = tails, size, tails.site()
        self.record, self.name, self.refused = record, record.source.name, tails.refused
        self.numbers, self.writer = tails.domain.numbers, tails.domain.tensors.writer
        self.added = tails.domain.objects.added(record) or []

    @property
    def kind(self) -> type:
        return list

    def refuse(self, what: str) -> NoReturn:
        self.refused.add(self.site)  # a list of Python's own can do that
        detail = f"{what} of the end of {self.name}, which held something else in each call"
        raise Break("container that changes from call to call", detail, HINT)

    def length(self) -> Any:
        return self.tails.length_of(self.record, self.size)

    def expression(self, emitter: Residual) -> Expression:
        return emitter.value(self.items)

    def today(self) -> list[Any]:
        """Its items, with some number for each that only the running step knows."""
        added = [example(one) for one in self.added]
        return end_of(self.record.obj, self.size, *added)

    def given_to(self, function: Callable[..., Any]) -> Any:
        """``function(tail)``, which gives a float on numbers such as there are today."""
        kind, today = np.float64 if is_numpy_function(function) else float, self.today()
        target = of_items(function, kind)
        try:
            target(today)
        except Exception:  # (it is raised where the step calls it)
            self.writer.before_failure(target, (self.items,))
            self.refuse(function.__name__)
        return Number(self.numbers, kind(0.5), self.writer.call(target, self.items))


class Tails:
    """Those of one trace."""

    def __init__(self, domain: Parts):
        self.domain, self.inputs = domain, dict[int, TensorProxy]()
        self.refused = domain.bounds.refused

    def site(self) -> Any:
        """The instruction that asks."""
        frame = self.domain.frame
        return None if frame is None else (frame.code, frame.pc)

    def input(self, record: Record) -> TensorProxy:
        if id(record) not in self.inputs:
            name = f"list {len(self.inputs)}"  # (stands for it in the graph, which must not hold it)
            tensors = self.domain.tensors
            self.inputs[id(record)] = tensors.add_input(record.obj, name, record.source)
        return self.inputs[id(record)]

    def of(self, values: Any, size: int = sys.maxsize) -> Tail | None:
        """The end of a list of which nothing else is known; None of any other."""
        domain, objects = self.domain, self.domain.objects
        if type(values) not in RINGS or self.site() in domain.bounds.elsewhere:
            return None
        if not (domain.tensors.whole_step and domain.tensors.writer.runs_at_most_once):
            return None
        record = objects.growing_list(values, RINGS)
        if record is None or not (objects.has_open_length(record) or objects.added(record)):
            return None
        tail = Tail(self, record, min(size, objects.kept_by(record)))
        if not ADDED.issuperset(map(type, tail.added)):
            return None
        objects.heap.note("end of a list")
        tail.items = Number(tail.numbers, [], tail.writer.call(end_of, self.input(record), tail.size, *tail.added))
        return tail

    def length_of(self, record: Record, most: int) -> Any:
        """How many items there are by now, of so many at most."""
        domain = self.domain
        before, added = domain.objects.length_before(record), len(domain.objects.added(record) or ())
        found = domain.binary("+", before, added) if added else before
        return found if most == sys.maxsize else domain.numbers.apply(min, most, found)

    def at(self, values: Any, key: slice) -> Tail | None:
        """``values[-100:]``."""
        ends = key.stop is None and key.step is None and type(key.start) is int and key.start < 0
        return self.of(values, -key.start) if ends and type(values) is list else None

    def call(self, function: Any, values: Any) -> Any:
        """``function(values)`` of the end of a list, or of one; ABSENT for any other."""
        if not is_numpy_function(function) and not any(function is one for one in PYTHONS):
            return ABSENT
        tail = values if type(values) is Tail else self.of(values)
        return ABSENT if tail is None else tail.given_to(function)


TAILED = frozenset((Tail, *RINGS))
