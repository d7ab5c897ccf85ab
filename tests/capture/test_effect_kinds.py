"""Each kind of effect: what a captured step leaves behind is what plain Python leaves, and with that kind switched off
the comparison notices. Three calls of each step, the last with another size."""

from __future__ import annotations

import collections
import contextvars
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from plain_python import Reader, compare
from torch import nn

from moebius.codegen.effect_replay import EffectReplay
from moebius.heap.objects import Objects
from moebius.heap.records import Record
from moebius.lowering.step import texts
from moebius.python.attributes import Attributes
from moebius.python.calls import Calls
from moebius.python.containers import Containers
from moebius.trace import failures, segment
from moebius.trace.failures import FailureHandler

log = logging.getLogger(__name__)
counter = 0
CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("CURRENT", default=0)


class Bag:
    limit = 3

    def __init__(self) -> None:
        self.items: list[Any] = [1, 2]
        self.table: dict[str, Any] = {"a": 1, "b": 2}
        self.seen, self.recent = {1}, collections.deque([1, 2, 3], maxlen=3)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.groups: dict[str, list] = collections.defaultdict(list)
        self.count = 0


class Wide(Bag):
    """With enough to take away in each of three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.ordered = [1, 2, 3, 4], collections.OrderedDict.fromkeys((10, 20, 30))


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a: Any = 1


class SlottedToo(Slotted):
    """Slots and a ``__dict__``."""

    def __init__(self) -> None:
        super().__init__()
        self.c = 1


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("latest", torch.tensor(0.0))


class Tensors:
    def __init__(self) -> None:
        self.whole = torch.arange(8.0)
        self.view, self.out = self.whole[2:6], torch.zeros(8)
        self.aliases = [self.whole, self.view.view(2, 2)]


class Stream:
    """Holds an iterator that existed before the step."""

    def __init__(self, iterator: Iterator[int]) -> None:
        self.iterator, self.got = iterator, 0


def numbers() -> Iterator[int]:
    n = 0
    while True:
        n += 1
        yield n


# ----------------------------------------------------------------------------------------------------------------------
# Steps
# ----------------------------------------------------------------------------------------------------------------------


def lists(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.items.append(x.sum())
    bag.items[0] = x.shape[0]
    bag.items.insert(1, "second")
    bag.items[1:2] = [bag.items.pop()]
    bag.items.reverse()
    return x * len(bag.items)


def dicts(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.table["new"] = x.sum()
    bag.table.pop("a", None)
    bag.table["a"] = 5  # deleted and set again: last
    bag.table["b"] += 1
    bag.ordered.move_to_end("a")
    bag.ordered["z"] = bag.ordered.pop("b", 0)
    bag.groups["k"].append(x.shape[0])
    return x * len(bag.table)


def sets(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.seen.add(4 + len(bag.seen))
    bag.seen |= {7, 9}
    bag.seen.discard(1)
    return x * len(bag.seen)


def deques(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.recent.append(x.sum())
    bag.recent.rotate(1)
    return x * len(bag.recent)


def attributes(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.count += 1
    bag.last = x.mean()  # type: ignore[attr-defined]
    bag.__dict__["under"] = setattr(bag, "other", 1)
    del bag.other  # type: ignore[attr-defined]
    return x * bag.count


def slots(thing: Slotted, x: torch.Tensor) -> torch.Tensor:
    thing.a = x.shape[0]
    thing.b = x.sum()
    return x * thing.a


def deleted_slots(thing: Slotted, x: torch.Tensor) -> torch.Tensor:
    if hasattr(thing, "a"):
        del thing.a
    else:
        thing.a = 2
    return x * 2


def class_attributes(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    type(bag).limit += 1
    return x * bag.limit


def global_names(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    global counter
    counter += 1
    bag.items.append(counter)
    return x * counter


def buffers(module: Buffers, x: torch.Tensor) -> torch.Tensor:
    module.steps = module.steps + 1
    module.latest = x.detach().mean()
    return x * module.steps


def iterators(stream: Stream, x: torch.Tensor) -> torch.Tensor:
    stream.got = next(stream.iterator, 0)
    return x * stream.got


def loops_over_iterators(stream: Stream, x: torch.Tensor) -> torch.Tensor:
    stream.got = 0
    for value in stream.iterator:
        stream.got += value
        if stream.got > 3:
            break
    return x * stream.got


def aliases(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.table["list"].append(x.shape[0])
    bag.items.append(len(bag.table["list"]))
    return x * len(bag.table["list"])


def one_list_twice() -> Bag:
    bag = Bag()
    bag.table["list"] = bag.items
    return bag


def prints(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    print("first", x.shape[0])
    print(f"mean of {x.shape}:", x.mean())
    bag.count += 1
    return x


def logs(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    print("before")
    log.warning("%d items", len(bag.items))
    bag.items.append(1)
    print("between")
    warnings.warn(f"{len(bag.items)} items", stacklevel=1)
    print("after", file=sys.stderr)
    return x


def random_tensors(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5) + torch.rand(4) + torch.randn_like(x).sum()


def random_numbers(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    return x * random.random() + random.randint(0, 9)


def shuffled(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    random.shuffle(bag.items)
    bag.items.append(bag.ordered.popitem()[0])
    bag.seen ^= {1, 9}
    return x * bag.items[0]


def in_place(tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    tensors.whole.add_(1)
    tensors.view[1:].mul_(3)
    tensors.aliases[1][0, 0] = x.shape[0]
    tensors.whole[::2] = tensors.view.sum()
    torch.add(tensors.whole, 1, out=tensors.out)
    tensors.view += 1
    return x * tensors.whole.sum()


def context(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    CURRENT.set(CURRENT.get() + 1)
    bag.items.append(CURRENT.get())
    return x * CURRENT.get()


def raises(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.count += 1
    bag.items.append(x.sum())
    print("so far")
    inner_raise(bag, x)
    bag.items.append("not in the first calls")
    return x


def inner_raise(bag: Bag, x: torch.Tensor) -> None:
    bag.table["inner"] = x.shape[0]
    if x.shape[0] == 3:
        raise ValueError(f"{x.shape[0]} rows")


def fails(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.count += 1
    bag.items.append(x.sum())
    try:
        y = inner_index(bag, x)
    finally:
        bag.table["finally"] = bag.count
    bag.items.append("not in the first calls")
    return x * y.sum()


def inner_index(bag: Bag, x: torch.Tensor) -> torch.Tensor:
    bag.table["inner"] = x.shape[0]
    places = (x.detach() * 0).long() + 6 - x.shape[0]  # three rows: 3, which is one too many
    return torch.ones(3)[places]


# ----------------------------------------------------------------------------------------------------------------------
# Kinds
# ----------------------------------------------------------------------------------------------------------------------


def not_replayed(which: Callable[[EffectReplay, Record], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes of some objects are forgotten at the end of a trace."""

    def off(patch: pytest.MonkeyPatch) -> None:
        real = EffectReplay.replay

        def replay(writer: EffectReplay, record: Record, name: str) -> None:
            if not which(writer, record):
                real(writer, record, name)

        patch.setattr(EffectReplay, "replay", replay)

    return off


def not_replayed_of(*kinds: type) -> Callable[[pytest.MonkeyPatch], None]:
    return not_replayed(
        lambda writer, record: type(record.obj) in kinds and id(record) not in writer.objects.owners
        and "__name__" not in record.obj
    )  # fmt: skip


def instance_dicts_forgotten(writer: EffectReplay, record: Record) -> bool:
    return id(record) in writer.objects.owners


def globals_forgotten(writer: EffectReplay, record: Record) -> bool:
    return record.obj is globals()


def buffers_forgotten(writer: EffectReplay, record: Record) -> bool:
    return record.source.name.endswith("_buffers")


def slots_forgotten(patch: pytest.MonkeyPatch) -> None:
    for name in ("set_generic", "delete_generic"):
        real = getattr(Attributes, name)

        def change(self: Any, obj: Any, attribute: str, *value: Any, real: Any = real) -> None:
            if not isinstance(getattr(type(obj), attribute, None), types.MemberDescriptorType):
                real(self, obj, attribute, *value)

        patch.setattr(Attributes, name, change)


def classes_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Attributes.set
    patch.setattr(Attributes, "set", lambda self, o, *rest: None if isinstance(o, type) else real(self, o, *rest))


def iterators_taken_for_new(patch: pytest.MonkeyPatch) -> None:
    for name in ("get_iter", "next_item"):
        real = getattr(Containers, name)

        def with_new(self: Any, value: Any, real: Any = real) -> Any:
            if isinstance(value, Iterator):
                self.objects.new.setdefault(id(value), value)
            return real(self, value)

        patch.setattr(Containers, name, with_new)


def aliases_told_apart(patch: pytest.MonkeyPatch) -> None:
    real = Objects.enter

    def enter(self: Objects, value: Any, source: Any) -> Any:
        known = self.records.get(id(value))
        if type(value) is list and known is not None and known.source is not source:
            del self.records[id(value)]
        return real(self, value, source)

    patch.setattr(Objects, "enter", enter)


def nothing_said(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(texts, "say", lambda *values: None)


def logging_skipped(patch: pytest.MonkeyPatch) -> None:
    real = Calls.python_function

    def call(self: Any, function: Any, args: list, kwargs: dict) -> Any:
        return None if function.__module__ == "logging" else real(self, function, args, kwargs)

    patch.setattr(Calls, "python_function", call)


def dice_thrown_once(patch: pytest.MonkeyPatch) -> None:
    """Python's random numbers are those of the trace."""
    patch.setattr(Calls, "drawn_below", lambda self, owner, count: owner._randbelow(count))


def graphs_run(wrapped: Callable[[Callable], Callable]) -> Callable[[pytest.MonkeyPatch], None]:
    def off(patch: pytest.MonkeyPatch) -> None:
        real = segment.lower

        def lower(graph: Any, options: Any) -> Any:
            lowered = real(graph, options)
            lowered.fn = wrapped(lowered.fn)
            return lowered

        patch.setattr(segment, "lower", lower)

    return off


def without_random_state(run: Callable) -> Callable:
    def forked(*inputs: Any) -> Any:
        with torch.random.fork_rng():
            return run(*inputs)

    return forked


def on_copies(run: Callable) -> Callable:
    return lambda *inputs: run(*(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs))


def forgotten(patch: pytest.MonkeyPatch, owner: type) -> None:
    """What is put into owners of a type is not replayed."""
    real = Objects.changed_records
    patch.setattr(Objects, "changed_records", lambda self: [r for r in real(self) if type(r.obj) is not owner])


def context_forgotten(patch: pytest.MonkeyPatch) -> None:
    forgotten(patch, contextvars.ContextVar)


def no_effects_before_a_failure(patch: pytest.MonkeyPatch) -> None:
    def __call__(self: Any, failed: list, args: tuple, kwargs: dict, inputs: tuple) -> Any:
        error = failed.pop()
        return [lambda: self.raise_again(error)]

    patch.setattr(FailureHandler, "__call__", __call__)


def no_frames_at_a_failure(patch: pytest.MonkeyPatch) -> None:
    """The effects are replayed; the frames that the operator was in are not gone through: no handlers, no lines."""
    patch.setattr(failures, "connected", lambda stopped: [])


@dataclass
class Kind:
    """make: what the step changes; off: plants the fault. broken: graph breaks carry this effect."""

    name: str
    step: Callable[[Any, torch.Tensor], Any]
    make: Callable[[], Any]
    off: Callable[[pytest.MonkeyPatch], None]
    broken: bool = False

    def recipe(self) -> tuple[Callable[[torch.Tensor], Any], list[Any]]:
        global counter
        counter, Bag.limit = 0, 3
        CURRENT.set(0)
        thing = self.make()

        def step(x: torch.Tensor) -> Any:
            return self.step(thing, x)

        return step, [thing]


KINDS = [
    Kind("list", lists, Bag, not_replayed_of(list)),
    Kind("dict", dicts, Bag, not_replayed_of(dict)),
    Kind("ordered dict", dicts, Bag, not_replayed_of(collections.OrderedDict)),
    Kind("default dict", dicts, Bag, not_replayed_of(collections.defaultdict)),
    Kind("set", sets, Bag, not_replayed_of(set)),
    Kind("deque", deques, Bag, not_replayed_of(collections.deque)),
    Kind("object with a dict", attributes, Bag, not_replayed(instance_dicts_forgotten)),
    Kind("slots", slots, Slotted, slots_forgotten),
    Kind("slots and a dict", slots, SlottedToo, slots_forgotten),
    Kind("slots deleted", deleted_slots, Slotted, slots_forgotten, broken=True),
    Kind("class attributes", class_attributes, Bag, classes_forgotten),
    Kind("globals", global_names, Bag, not_replayed(globals_forgotten)),
    Kind("module buffers", buffers, Buffers, not_replayed(buffers_forgotten)),
    Kind("list iterator", iterators, lambda: Stream(iter([3, 4, 5, 6])), iterators_taken_for_new),
    Kind("map", iterators, lambda: Stream(map(int, "3456")), iterators_taken_for_new, broken=True),
    Kind("generator", iterators, lambda: Stream(numbers()), iterators_taken_for_new, broken=True),
    Kind("for over an iterator", loops_over_iterators, lambda: Stream(iter(range(9))), iterators_taken_for_new),
    Kind("for over a generator", loops_over_iterators, lambda: Stream(numbers()), iterators_taken_for_new, True),
    Kind("aliases", aliases, one_list_twice, aliases_told_apart),
    Kind("print", prints, Bag, nothing_said),
    Kind("logging, warnings, print in order", logs, Bag, logging_skipped, broken=True),
    Kind("torch's random state", random_tensors, Bag, graphs_run(without_random_state)),
    Kind("Python's random state", random_numbers, Bag, dice_thrown_once),
    Kind("shuffled", shuffled, Wide, not_replayed_of(list), broken=True),
    Kind("tensors in place", in_place, Tensors, graphs_run(on_copies)),
    Kind("context variables", context, Bag, context_forgotten),
    Kind("raise in mid-step", raises, Bag, not_replayed(instance_dicts_forgotten), broken=True),
    Kind("failing operator: effects", fails, Bag, no_effects_before_a_failure),
    Kind("failing operator: frames", fails, Bag, no_frames_at_a_failure),
]


@pytest.fixture(autouse=True)
def log_to_stderr() -> Iterator[None]:
    """To the stream that ``sys.stderr`` is when something is logged: the comparison has one of its own."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(self.format(record), file=sys.stderr)

    handler = Handler()
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_as_in_plain_python(kind: Kind) -> None:
    found = compare(kind.recipe)
    assert bool(found.breaks) == kind.broken
    assert found.graphs >= 1 or kind.broken


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_noticed_when_switched_off(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    kind.off(monkeypatch)
    with pytest.raises(AssertionError, match="call "):
        compare(kind.recipe)


def closure() -> tuple[Callable[[torch.Tensor], Any], list[Any]]:
    calls, last = 0, None

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls, last
        calls += 1
        last = x.detach().sum()
        return x * calls

    def read() -> tuple[int, Any]:
        return calls, last

    return step, [Reader(read)]


def test_closure_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(closure).breaks == 0
    forgotten(monkeypatch, types.CellType)
    with pytest.raises(AssertionError, match="call "):
        compare(closure)
