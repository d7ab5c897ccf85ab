"""Collects the facts that tracing relied on.

Facts about static objects are kept under the watched object (one entry a dict, a class, a list), so that an untouched
object costs one comparison. Facts about dynamic sources are a list of checks over slots, in the order they were met.
"""

from __future__ import annotations

import abc
import enum
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import MISSING, lookup

from ..hook import ABSENT
from ..report.records import Guard
from .abstract import NoSubclasses
from .sources import Part, Source, Static, from_arguments

Where = tuple[str, int]


class Later(Protocol):
    """Guards of some of the same places, which a backward that the caller runs asks. changed: called with what reads a
    place that has changed, its name for ``Assumptions.natively``, and the place."""

    guards: Any
    changed: Callable[[str, str, str], None]


CONSTANTS = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size)


def holds_one(operand: Any, wanted: set[int]) -> bool:
    """Whether a guard's operand is one of these objects, by their ids, or a tuple or list that holds one."""
    inside = operand if type(operand) in (tuple, list, frozenset) else ()
    return id(operand) in wanted or any(holds_one(part, wanted) for part in inside)


def shown(value: Any, limit: int = 60) -> str:
    """A constant as a report writes it. Of a frozenset's items no code of the user's runs for it."""
    try:
        text = f"frozenset({{{', '.join(map(describe, value))}}})" if type(value) is frozenset else repr(value)
    except ValueError:  # of very large ones Python refuses the digits
        text = f"an int of {value.bit_length()} bits"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def describe(value: Any, limit: int = 60) -> str:
    """A short text for a value in a report: numbers and strings as they are, the rest by kind. No code of the user's
    runs for it."""
    if value is ABSENT:
        return "absent"
    if type(value) in CONSTANTS:
        return shown(value, limit)
    if issubclass(type(value), type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        text = value.__qualname__  # of another callable it could be user code that makes it
    elif issubclass(type(value), enum.Enum):
        text = f"{type(value).__qualname__}.{object.__getattribute__(value, '_name_')}"
    else:
        text = f"the same {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(eq=False)  # (what is checked may be tensors)
class Fact:
    """One check of the program. made: called for its record in reports, whose texts nobody may ever read. places: of
    the entries of a dict or class: who read them. sources: where it is about several."""

    check: tuple[Any, ...]
    made: Callable[[], Guard]
    source: Source | None = None
    places: Mapping[Any, Where] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()

    @functools.cached_property
    def record(self) -> Guard:
        """What reports show of the check."""
        return self.made()


@dataclass
class WatchedDict:
    """A dict whose identity is certain; entries are what was read in it, ABSENT for keys that were missing."""

    name: str
    where: Where
    entries: dict[Any, Any] = field(default_factory=dict)
    keys: tuple | None = None
    places: dict[Any, Where] = field(default_factory=dict)  # the line that read each entry

    def __call__(self) -> Guard:
        """What reports show of it."""
        if len(self.entries) == 1 and self.keys is None:
            ((key, value),) = self.entries.items()
            text = f"[{shown(key)}] is {describe(value)}" if type(key) in (str, int) else describe(value)
        else:
            entries = ", ".join(
                f"{k}: {describe(v)}" for k, v in list(self.entries.items())[:6] if is_kind(k, str | int)
            )
            text = f"{len(self.entries)} entries unchanged ({entries}{', …' if len(self.entries) > 6 else ''})"
            if self.keys is not None:
                text = f"keys unchanged ({len(self.keys)}); {text}"
        return Guard(self.name, text, *self.where)


@dataclass
class WatchedClass:
    """A class; entries are the results of look-ups along its method resolution order."""

    cls: type
    where: Where
    entries: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Where] = field(default_factory=dict)


@dataclass
class WatchedInstance:
    """An object whose identity is certain. namespace: its ``__dict__``, or None where nothing was read in it."""

    name: str
    where: Where
    obj: Any
    cls: type
    namespace: dict[str, Any] | None = None

    def __call__(self) -> Guard:
        """What reports show of it."""
        text = f"type is {self.cls.__qualname__}{'' if self.namespace is None else ', the same __dict__'}"
        return Guard(self.name, text, *self.where)


class GuardRecorder:
    """All facts of one trace. ``where`` gives the user's current line; each method records one kind of fact."""

    def __init__(self, where: Callable[[], Where]):
        self.where = where
        self.dicts: dict[int, tuple[dict, WatchedDict]] = {}
        self.classes: dict[int, WatchedClass] = {}  # by id: its metaclass may hash and compare
        self.instances: dict[int, WatchedInstance] = {}
        self.facts: list[Fact] = []
        self.layouts: dict[int, dict[str, Any]] = {}  # of the tensors that are the same object in each call, by id
        self.slots: list[tuple[Any, ...]] = []
        self.slot_of: dict[Source, int] = {}
        self.seen: set[tuple] = set()
        self.roots: list[weakref.ref] = []
        self.models: list[tuple[weakref.ref, str]] = []  # and optimizers: each with its place
        self.abstract: NoSubclasses | None = None
        self.later: list[Later] = []

    def let_go(self) -> None:
        """Of the user's objects, once the guards are made or the trace was for nothing."""
        for known in (self.dicts, self.classes, self.instances, self.facts, self.layouts, self.slot_of, self.seen):
            known.clear()

    def forget(self, objects: list[Any]) -> None:
        """What is known of these, which are to die when the step lets them go. (What runs then needs no guards.)"""
        gone = set(map(id, objects))
        self.dicts = {key: found for key, found in self.dicts.items() if key not in gone}
        self.instances = {key: found for key, found in self.instances.items() if key not in gone}
        for _, watched in self.dicts.values():
            watched.entries = {key: value for key, value in watched.entries.items() if id(value) not in gone}
        self.facts = [fact for fact in self.facts if not any(holds_one(operand, gone) for operand in fact.check)]
        self.layouts = {key: found for key, found in self.layouts.items() if key not in gone}

    # ------------------------------------------------------------------------------------------------------------------
    # Static objects
    # ------------------------------------------------------------------------------------------------------------------

    def dict_entry(self, name: str, the_dict: dict, key: Any, value: Any) -> None:
        """``the_dict[key]`` is this very object (or an equal constant); ABSENT when the key is missing."""
        if can_die(key):  # the program must not keep it alive
            self.holds(name, "the same entry", functools.partial(has_entry, the_dict, weakref.ref(key), value))
            return
        watched = self.watched(name, the_dict)
        if key not in watched.entries:
            watched.entries[key] = value
            watched.places[key] = self.where()

    def dict_keys(self, name: str, the_dict: dict) -> None:
        """The dict has exactly these keys, in this order."""
        watched = self.watched(name, the_dict)
        if watched.keys is None:
            watched.keys = tuple(the_dict)

    def watched(self, name: str, the_dict: dict) -> WatchedDict:
        entry = self.dicts.get(id(the_dict))
        if entry is None:
            entry = self.dicts[id(the_dict)] = (the_dict, WatchedDict(name, self.where()))
        return entry[1]

    def class_entry(self, cls: type, name: str, value: Any) -> None:
        """Looking ``name`` up along the class's MRO gives this very object, or nothing (ABSENT)."""
        watched = self.class_order(cls)
        if name not in watched.entries:
            watched.entries[name], watched.places[name] = value, self.where()

    def class_order(self, cls: type) -> WatchedClass:
        """The class has the method resolution order that it has now."""
        watched = self.classes.get(id(cls))
        if watched is None:
            watched = self.classes[id(cls)] = WatchedClass(cls, self.where())
        return watched

    def instance(self, source: Source, obj: Any, namespace: dict[str, Any] | None) -> None:
        """An object that is the same each call still has this type and, if given, keeps its attributes in this dict."""
        if is_kind(source, Static) and source.via is not None:  # an argument: the program must not keep it alive
            self.check("type", source, type(obj), text=f"type is {type(obj).__qualname__}")
            if namespace is not None:
                place = Part(f"{source.name}.__dict__", source, "instance_dict")
                self.check("is", place, namespace, text="the same dict")
            return
        watched = self.instances.get(id(obj))
        if watched is None:
            watched = self.instances[id(obj)] = WatchedInstance(source.name, self.where(), obj, type(obj))
        watched.namespace = watched.namespace if namespace is None else namespace

    # ------------------------------------------------------------------------------------------------------------------
    # Any source
    # ------------------------------------------------------------------------------------------------------------------

    def slot(self, source: Source) -> int:
        """The program's slot that holds the object of ``source``, made on first use."""
        if is_kind(source, Static) and source.via is not None:
            return self.slot(source.via)  # the argument itself: the program must not keep it alive
        index = self.slot_of.get(source)
        if index is None:
            operation, parents, *operands = source.slot()
            before = [self.slot(parent) for parent in parents]
            self.slots.append((operation, *before[:1], *operands, *before[1:]))
            index = self.slot_of[source] = len(self.slots) - 1
        return index

    def check(self, kind: str, source: Source, *operands: Any, text: str) -> None:
        """One fact about the object of ``source``. ``kind`` is a check of the guard program (see ``moebius.hook``)."""
        slot = self.slot(source)
        key = (kind, slot, *(id(o) for o in operands))
        if key in self.seen and kind in ("type", "is"):
            return
        self.seen.add(key)
        if kind == "is" and (can_die(operands[0]) or is_kind(operands[0], torch.Tensor)):
            kind, operands = "is_weak", (weakref.ref(operands[0]),)
        self.add((kind, slot, *operands), source.name, text, source)

    def equals(self, source: Source, value: Any) -> None:
        """The place holds this constant."""
        self.check("equal", source, value, text=f"== {shown(value)}")

    def function(self, name: str, function: types.FunctionType) -> None:
        """A function that is the same each call still has this code and these defaults."""
        code, defaults, keyword_defaults = function.__code__, function.__defaults__, function.__kwdefaults__
        check = ("function", function, code, defaults, keyword_defaults)
        self.add(check, name, "code and defaults unchanged", None)
        for key, value in (keyword_defaults or {}).items():
            assert keyword_defaults is not None
            self.dict_entry(f"{name}.__kwdefaults__", keyword_defaults, key, value)

    def answers(self, name: str, text: str, *pairs: tuple[Callable[[], Any], Any]) -> None:
        """Each callable, called without arguments, gives the same constant again."""
        self.add(("answers", pairs), name, text, None)

    def subclass(self, kind: type, base: type) -> bool:
        """``issubclass``, under a guard where it may become true later."""
        answer = issubclass(kind, base)
        if not answer and is_kind(base, abc.ABCMeta):
            if self.abstract is None:
                self.abstract = NoSubclasses()
                self.holds("abstract classes", "have no further subclasses", self.abstract)
            self.abstract.add(kind, base)
        return answer

    def same_or_distinct(self, kind: str, first: Source, second: Source) -> None:
        """Two sources lead to one object ("same") or to two ("distinct")."""
        if (kind, first, second) in self.seen:
            return
        self.seen.add((kind, first, second))
        text = "is the same as" if kind == "same" else "is not"
        check = (kind, self.slot(first), self.slot(second))
        self.add(check, first.name, f"{text} {second.name}", first, (first, second))

    def all_distinct(self, sources: list[Source], what: str = "objects", shown: int = 6) -> None:
        """No two of the sources lead to one object."""
        if len(sources) > 1 and not all(source.static for source in sources):
            names = ", ".join(source.name for source in sources[:shown]) + (", …" if len(sources) > shown else "")
            slots = [self.slot(source) for source in sources]
            self.add(("distinct", *slots), sources[0].name, f"{names} are different {what}", None, tuple(sources))

    def holds(self, name: str, text: str | Callable[[], str], predicate: Callable[..., Any], *sources: Source) -> None:
        """``predicate(*objects of sources)`` is true."""
        self.add(("python", predicate, *(self.slot(s) for s in sources)), name, text, sources[0] if sources else None)

    def static_tensor(self, name: str, tensor: torch.Tensor, meta: dict[str, Any]) -> None:
        """A tensor that is the same object each call still has this metadata."""
        self.layouts[id(tensor)] = meta
        self.add(("static_tensor", tensor, meta), name, lambda: describe_tensor(meta), None)

    def add(
        self, check: tuple[Any, ...], name: str, text: str | Callable[[], str], source: Source | None,
        sources: tuple[Source, ...] = (),
    ) -> None:  # fmt: skip
        where = self.where()

        def record() -> Guard:
            return Guard(name, text if is_kind(text, str) else text(), *where)

        several = tuple(from_arguments(each) for each in sources if not each.static)  # (a static one holds the object)
        self.facts.append(Fact(check, record, None if source is None else from_arguments(source), sources=several))

    def root(self, obj: Any) -> None:
        """An argument that was guarded by identity: when it dies, what was captured for it can go too."""
        self.roots.append(weakref.ref(obj))

    def model(self, obj: Any, place: str) -> None:
        """A model or optimizer is guarded by identity."""
        self.models.append((weakref.ref(obj), place))


MORTAL: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
if torch.distributed.is_available():  # a group's threads end with it: where it outlives the interpreter, they abort
    MORTAL += (torch.distributed.ProcessGroup,)

WEAKLY = type.__dict__["__weakrefoffset__"].__get__  # (asks no metaclass)


def can_die(obj: Any) -> bool:
    """Objects of the user's that a guard may not keep alive: models, and what does something as it goes."""
    kind = type(obj)
    return issubclass(kind, MORTAL) or (lookup(kind, "__del__") is not MISSING and can_be_held_weakly(obj))


def can_be_held_weakly(obj: Any) -> bool:
    return WEAKLY(type(obj)) != 0  # (of Python's classes it lies before the object since 3.12, below 0)


def has_entry(the_dict: dict, key: weakref.ref, value: Any) -> bool:
    """Whether the dict still has this object under the key."""
    return (obj := key()) is not None and same_constant(dict.get(the_dict, obj, ABSENT), value)


def same_constant(now: Any, expected: Any) -> bool:
    """Whether this is the very object, or an equal constant (0.0 is not -0.0, as in ``mb_same_value``), or a tuple or
    frozenset of such."""
    if now is expected or type(now) is not type(expected):
        return now is expected
    if type(now) in (tuple, frozenset):
        return len(now) == len(expected) and all(map(same_constant, now, expected))
    if type(now) in (float, complex):
        return repr(now) == repr(expected)
    return type(now) in (int, str, bytes) and now == expected


def tensor_meta(
    tensor: torch.Tensor, dynamic_dims: frozenset[int] = frozenset(), any_offset: bool = False
) -> dict[str, Any]:
    """The metadata that a guard compares; sizes in ``dynamic_dims`` (and the strides they make) are left open.

    any_offset: where in its storage the tensor begins is left open, too."""
    strided = tensor.layout is torch.strided
    open_strides = bool(dynamic_dims)
    return {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "shape": tuple(None if d in dynamic_dims else s for d, s in enumerate(tensor.shape)),
        "stride": tuple(tensor.stride()) if strided and not open_strides else None,
        "requires_grad": tensor.requires_grad,
        "is_conj": tensor.is_conj(),  # (``z.conj()`` and its imaginary part are views that only say so)
        "is_neg": tensor.is_neg(),
        **({} if any_offset else {"storage_offset": tensor.storage_offset() if strided else None}),
    }


def describe_tensor(meta: dict[str, Any]) -> str:
    """``float32[4, s, 8] cpu, strides (..), requires grad``."""
    sizes = ", ".join("s" if s is None else str(s) for s in meta["shape"])
    grad = ", requires grad" if meta["requires_grad"] else ""
    stride = "" if meta["stride"] is None else f", strides {meta['stride']}"
    return f"{str(meta['dtype']).removeprefix('torch.')}[{sizes}] on {meta['device']}{stride}{grad}"
