"""What code of the user's that answers for an attribute (``__getattribute__``, a property's getter) gave for an object.

A layer's code asks the model's configuration the same in each layer. Where nothing that the code read has been written
since, it is not interpreted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..heap.heap import Event
from ..heap.records import SIMPLE
from ..torch_facts import torch_private
from ..values.values import proxies_in
from .parts import Parts

READS = frozenset(("entry", "whole", "cell", "value", "class", "defaults"))  # of what only a logged write changes
# (of a tensor that was read, its metadata may have been asked)


@dataclass
class Found:
    """One answer. reads: of what existed before the call. begin, outside: how long the log of reads and writes was, and
    how many of these were to what existed before. instructions, counted: what its code ran."""

    getter: Any
    value: Any
    reads: list[Event]
    begin: int
    outside: int
    instructions: int
    counted: dict[int, int]


class Lookups:
    """The answers of one trace."""

    def __init__(self, domain: Parts):
        self.domain, self.objects, self.heap = domain, domain.objects, domain.objects.heap
        self.writer = domain.tensors.writer
        self.found: dict[tuple, Found] = {}

    def ask(self, getter: Any, obj: Any, *name: str) -> Any:
        """``getter(obj, *name)``."""
        domain, heap, objects = self.domain, self.heap, self.objects
        # (what a branch has written is taken back without a word; who listens wants all reads)
        apart = objects.inside or self.writer.is_inner or domain.open_loops or domain.counter.autograds
        if apart or heap.listening or objects.record_of(obj) is None:
            return domain.calls.call(getter, [obj, *name], {})
        key = (id(getter), id(obj), domain.attributes.of_classes.changes, torch_private.modes(), *name)
        if (known := self.found.get(key)) is not None and self.holds(known):
            heap.events += known.reads
            domain.instructions += known.instructions
            domain.counter.repeat(known.counted)
            return known.value
        begin, nodes, ran, counts = heap.mark(), self.writer.count, domain.instructions, domain.counter.mark()
        value = domain.calls.call(getter, [obj, *name], {})
        older = [event for event in heap.reads(begin) if heap.age(event[1]) < begin]
        if self.writer.count == nodes and not heap.changes_older(begin) and self.is_known(value):
            if not proxies_in(older) and all(event[0] in READS and heap.age(event[1]) < 0 for event in older):
                counted = domain.counter.since(counts)
                ran = domain.instructions - ran
                self.found[key] = Found(getter, value, older, len(heap.events), heap.outside, ran, counted)
        return value

    def holds(self, known: Found) -> bool:
        """Whether nothing that was read has been written since."""
        if known.outside != self.heap.outside:
            if any(self.heap.was_written(event, known.begin) for event in known.reads):
                return False
            known.begin, known.outside = len(self.heap.events), self.heap.outside
        return True

    def is_known(self, value: Any) -> bool:
        """Whether the value is the same whoever asks: plain, or an object that existed before."""
        return type(value) in SIMPLE or (self.objects.record_of(value) is not None and not self.objects.is_new(value))
