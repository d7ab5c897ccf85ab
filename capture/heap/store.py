"""What a trace knows of the objects that it met: which it made, which existed before, and who wants to hear of them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import GuardRecorder
from ..guards.sources import OpenPlaces, Source, Static
from ..values.values import ATOMS, Body, Break, TensorProxy
from .heap import WHOLE, Heap
from .records import MetTuple, Record


class Store:
    """Base of the parts of ``Objects``. ``symbolic_places``: names of places whose value differs from call to call."""

    # what other parts define
    # for the heap, by kind of read: what a read would find now
    what_is_now: Callable[[], dict[str, Callable[[Any, Any, Any], Any]]]
    enter: Callable[[Any, Source], Any]  # the trace's value for one that was found at a place
    hangs: Callable[[Any, Any], None]  # what was read in a container, or an object's dict, goes with it
    contents: Callable[..., Any]  # a real container that stands for one, for native code
    dict_get: Callable[[Record, Any], Any]  # the value at a key, or ABSENT
    dict_set: Callable[[Record, Any, Any], None]
    entry_now: Callable[[Record, Any], Any]  # what is held at the key by now, ABSENT if nothing
    # a known object was found at one more place: that it is the same one is a fact of today
    met_again: Callable[[Record, Source, Any], None]

    def __init__(
        self,
        guards: GuardRecorder,
        tensor_input: Callable[[torch.Tensor, Source], TensorProxy],
        symbolic: Callable[[Any, Source], Any],
        symbolic_places: OpenPlaces,
        tensors_met: dict[int, TensorProxy] | None = None,
    ):
        self.heap = heap = Heap()
        self.note = heap.note
        self.tensors_met = {} if tensors_met is None else tensors_met  # by id of the real tensor
        self.guards, self.tensor_input = guards, tensor_input
        self.symbolic, self.symbolic_places = symbolic, symbolic_places
        self.records: dict[int, Record] = {}
        self.told_apart: dict[int, Record] = {}  # by id: keys of dicts and sets that the step makes
        self.hashed: dict[int, Any] = {}  # by id: keys whose class was followed as it hashes and compares them
        self.looked_at: list[tuple[Any, ...]] = []  # in that: reads of the heap
        self.new: dict[int, Any] = {}
        self.before_effects: list[Callable[[Any], None]] = []  # called with the emitter, before the effects on objects
        self.after_effects: list[Callable[[Any], None]] = []  # the same after them
        self.inside: list[tuple[Body, int]] = []  # the open ones, and since when: ``within``
        self.outcomes: dict[Any, tuple[Any, ...]] = {}  # tensors that the data decides: which ones each may be
        self.slices: dict[int, slice] = {}  # by id of the slice that was found: what stands for it
        self.tuples: dict[int, MetTuple] = {}  # by id of the tuple, and of what stands for it
        self.paths: dict[tuple[int, str], Source] = {}  # to tuples in watched dicts
        self.model_owned: set[int] = set()
        self.let_go: set[tuple[int, Any]] = set()  # places whose old contents may die: owner's id, and key
        self.dying: list[Any] = []  # what may die where the step breaks for that: no guard holds it
        self.namespaces: set[int] = set()
        self.behind: dict[int, dict] = {}  # by id of a mapping proxy: what it shows
        self.writes = 0
        heap.now |= self.what_is_now()
        self.owners: dict[int, Record] = {}  # by id of an instance dict's record
        self.drawn: dict[int, TensorProxy] = {}  # progress bars, by id of the instance dict's record
        self.told: dict[int, Callable[[], None]] = {}  # by id of a dict: who is told that it is read
        self.asked_context = False  # whether the step read an exception's ``__context__``
        self.class_dicts: dict[type, Record] = {}  # of classes whose attributes the step sets
        self.schedules: set[int] = set()  # instance dicts of schedulers
        self.varying: dict[str, tuple[str, str]] = {}
        self.logs: set[str] = set()  # lists to which the step was seen to append, by the names of their places
        self.tell: Callable[[str], None] = lambda name: None
        self.few_sizes: Callable[[Any], Any] = lambda value: value  # see ``python.few_sizes``
        self.joins: Callable[[Any], bool] = lambda place: False  # see ``branch_places.Joins``
        self.conditional: list[tuple[Record, Any]] = []  # what branches on numbers of the call write
        self.notes: Any = None  # the graph's dict in which these are noted

    def assume(
        self, logs: set[str], varying: dict[str, tuple[str, str]], tell: Callable[[str], None], numbers: Any
    ) -> None:
        """What earlier captures taught. tell: see ``VaryingPlaces``. numbers: see ``ComputedKeys``."""
        self.logs, self.varying, self.tell, self.numbers = logs, varying, tell, numbers

    def made(self, obj: Any) -> Any:
        """Register an object that tracing created. It lives as long as the trace, so that its id stays its own."""
        if type(obj) not in ATOMS and id(obj) not in self.records and id(obj) not in self.new:
            self.new[id(obj)] = obj
            if type(obj) is not TensorProxy or obj.source is None:  # (``p.mul_(2)`` gives what was there before)
                self.heap.made(obj)
        return obj

    def seen_through(self, obj: Any) -> Any:
        """What a mapping proxy shows, if that is known; anything else as itself."""
        return self.behind.get(id(obj), obj) if type(obj) is types.MappingProxyType else obj

    def is_new(self, obj: Any) -> bool:
        return id(obj) in self.new

    def is_known(self, obj: Any) -> bool:
        return id(obj) in self.new or id(obj) in self.records

    def touch(self, obj: Any, key: Any = WHOLE, lets_go: bool = True, place: Any = None) -> None:
        """Before anything is changed: inside a body only what was made in it may change. lets_go: whether something may
        go that is there; not where something only comes. place: what is set, where a branch may do that, or the side of
        it on which the write is done."""
        self.writes += 1
        record = self.records.get(id(obj))
        born = -1 if record is not None else self.heap.age(obj)
        begin = self.heap.mark()
        self.heap.write(obj if record is None else record.obj, key, born)
        if any(self.heap.was_written(event, begin) for event in self.looked_at):
            raise Break("key with its own hash", "what its class looks at changes", "change it outside of the step")
        if self.inside and born < self.inside[-1][1]:
            body = self.inside[-1][0]
            if not body.lenient and (place is None or not self.joins(place)):
                raise Break(body.reason, body.detail.format(type(obj).__name__), body.hint)

    def open_body(self, body: Body, since: int | None = None) -> None:
        """From here on, what is older must not be changed. since: than this mark, if not than now."""
        self.inside.append((body, self.heap.mark() if since is None else since))

    @contextmanager
    def within(self, body: Body, since: int | None = None) -> Iterator[None]:
        self.open_body(body, since)
        try:
            yield
        finally:
            self.inside.pop()

    def record_of(self, obj: Any) -> Record | None:
        return self.records.get(id(obj))

    def owner_of(self, namespace: Any) -> Record | None:
        """The record of the object whose ``__dict__`` this is, if somebody has met it."""
        return self.owners.get(id(self.record_of(namespace)))

    def found(self, obj: Any, source: Source | str) -> Record:
        """The record of an object; made, if nobody has met it yet. source: a name, for one that is always the same if
        nobody has found it otherwise."""
        record = self.records.get(id(obj))
        if record is None:
            place = Static(source, obj) if is_kind(source, str) else source
            record = self.records[id(obj)] = Record(obj, place)
        elif not is_kind(source, str):
            self.met_again(record, source, obj)
        return record

    def need(self, obj: Any) -> Record:
        """The record of an object that existed before; a graph break if nobody knows where it came from."""
        record = self.records.get(id(obj))
        if record is None:
            raise Break(
                "object of unknown origin",
                f"a {type(obj).__name__} was met that no guarded read led to",
                "it runs natively; reach it by an argument, an attribute or a global",
            )
        return record

    def is_entered(self, obj: Any) -> bool:
        """Whether ``obj`` itself, not what stands for it, came from outside."""
        record = self.records.get(id(obj))
        return record is not None and record.obj is obj

    def every_record(self) -> Iterable[Record]:
        return {id(r): r for r in self.records.values()}.values()

    def class_of(self, record: Record) -> type | None:
        """The class whose own dict a record is of."""
        return next((cls for cls, own in self.class_dicts.items() if own is record), None)

    def changed_records(self) -> list[Record]:
        """Records with something to replay, each once, in the order in which they were met."""
        return [r for r in self.every_record() if r.changed]
