"""Places that hold something else in each call, where what they hold decides: nothing general can be said of it.

After some captures that each met another text, tuple, object or number there, the frame holds the value as a thing of
which only the type is known. It may be kept, passed on and returned; what asks for more is a graph break, and what
stands before and after it is captured once.

So are containers: a list of losses, a deque of the last hundred. To append to them reads nothing, and what a
step has just added is known. A list that is longer in each call is read at its end, and its length is a number of the
graph. What reads one as a whole (``sum``, ``torch.stack``, an item) is a guard on all that it holds. A frame with a
loop over one runs natively as a whole.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step.filters import recorders

from ..guards.sources import Part, Source, as_written
from ..hook import ABSENT
from ..values.opaque_tensor import Varying
from ..values.values import Break
from .records import CONTAINERS, Record
from .store import Store

REASON = "value that varies from call to call"
RINGS = (list, collections.deque)
MAXLEN = operator.attrgetter("maxlen")
IN_EACH_TURN = "each iteration of the loop would be a graph break"


def length_of(source: Source) -> Part:
    """Where the length of a list is read."""
    return Part(f"len({source.name})", source, "python", len)


class VaryingPlaces(Store):
    """Part of ``Objects``. varying: by the name of such a place, what was met there, in words, and a hint.

    tell: called with the name of one that is needed now, before the graph break. added: what the step has added behind
    a list's items so far, in order; None where that depends on a branch.
    """

    added: Callable[[Record], list[Any] | None]

    def varies(self, value: Any, source: Source) -> bool:
        """Whether it stands for itself alone: a container may still be written to, a tensor has no value here."""
        if source.name not in self.varying or source.static:
            return False
        return type(value) not in CONTAINERS and not is_kind(value, torch.Tensor)

    def as_varying(self, value: Any, source: Source) -> Varying:
        """What stands for a value that is another one in each call."""
        self.guards.check("type", source, type(value), text=f"type is {type(value).__qualname__}")
        return self.made(Varying(type(value), source, self))

    def refuse_varying(self, sources: Iterable[Source]) -> None:
        """A graph break where the value of one of these places is needed now, and it varies."""
        for source in sources:
            if source.name in self.varying:
                self.refuse_one(source.name)

    def refuse_one(self, name: str) -> NoReturn:
        self.tell(name)
        met, hint = self.varying[name]
        in_each_iteration = "" if torch.is_grad_enabled() else IN_EACH_TURN  # (an optimizer's loop)
        raise Break(REASON, f"{as_written(name)} was {met}, and the step needs its value here", hint, in_each_iteration)

    def is_growing(self, record: Record) -> bool:
        """Whether it is one of these, and this call has not read it as a whole."""
        return record.source.name in self.varying and record.shadow is None

    def has_other_items_each_time(self, record: Record) -> bool:
        """Whether what it holds was seen to be another thing in each call."""
        return self.is_growing(record) or record.source.name in self.symbolic_places

    def refuse_recorder(self, record: Record) -> None:
        """A graph break where the items are read of a list to which every warning of the graph's is added."""
        if type(record.obj) is list and any(one is record.obj for one in recorders()):
            detail = f"{record.source.name} is read, and the block that records in it is open or was left just now"
            raise Break("warnings that were recorded", detail, "read it after the step")

    def of_open_length(self, value: Any) -> Record | None:
        """The record of a list or deque that is longer in each call, as far as it can be. Its items are not guarded for
        its length."""
        record = self.growing_list(value, RINGS)
        return record if record is not None and self.has_open_length(record) else None

    def length_before(self, record: Record) -> Any:
        """What it was when the step began: a number of the graph from the second length on."""
        self.heap.read("length", record.obj, None, None)
        place = length_of(record.source)
        if record.source.name in self.logs or self.added(record):
            self.symbolic_places |= {place.name}
        return self.enter(len(record.obj), place)

    def item_from_end(self, value: Any, key: Any) -> Any:
        """``log[-1]``: what the step has added to a list is known without a look at what was there before. What was
        the last item then, of a list that grows, is found from its end. ABSENT: its items have to be known."""
        record = self.growing_list(value, RINGS) if type(key) is int and key < 0 else None
        if record is None:
            return ABSENT
        added = self.added(record) or ()
        if -key <= min(len(added), self.kept_by(record)):
            self.heap.read("last", record.obj, None, None)
            return added[key]
        before = key + len(added)
        if type(value) is not list or not self.has_open_length(record) or -before > len(record.obj):
            return ABSENT
        self.heap.read("last", record.obj, None, None)
        place = Part(f"{record.source.name}[{before}]", record.source, "python", operator.itemgetter(before))
        if record.source.name in self.logs:
            self.symbolic_places |= {place.name}
        return self.enter(record.obj[before], place)

    def kept_by(self, record: Record) -> int:
        """How many items at most it holds."""
        if type(record.obj) is list:
            return sys.maxsize
        source = record.source
        most = self.enter(record.obj.maxlen, Part(f"{source.name}.maxlen", source, "python", MAXLEN))
        return sys.maxsize if most is None else most if type(most) is int else 0

    def growing_list(self, value: Any, kinds: tuple[type, ...] = (list,)) -> Record | None:
        """Its record, if it is a list from before of which nothing was read so far but what stands at its end."""
        record = self.records.get(id(value))
        if type(value) not in kinds or record is None or record.obj is not value or record.shadow is not None:
            return None
        self.refuse_recorder(record)
        return None if self.added(record) is None else record

    def has_open_length(self, record: Record) -> bool:
        is_log = record.source.name in self.logs or self.is_growing(record)
        return is_log or length_of(record.source).name in self.symbolic_places

    def appended(self) -> set[str]:
        """Lists from before to which the step has added something: logs. Another way through the step reads them."""
        return {r.source.name for r in self.every_record() if type(r.obj) in RINGS and (r.appends or r.late)}

    def refuse_growing(self, record: Record, in_loop: bool = False) -> None:
        """A graph break where one of these is to be read as a whole. in_loop: where a loop is to go through it."""
        if self.is_growing(record):
            what = ("gone through", IN_EACH_TURN) if in_loop else ("read as a whole", "")
            self.refuse_container(record.source.name, type(record.obj), *what)

    def refuse_walk(self, name: str, kind: type) -> None:
        """The same where an iterator from before goes through what is another in each call. name: of what is ahead."""
        if name in self.varying:
            self.refuse_container(name, kind, "gone through", IN_EACH_TURN)

    def refuse_container(self, name: str, kind: type, what: str, in_each_iteration: str) -> NoReturn:
        self.tell(name)
        raise Break(
            "container that changes from call to call",
            f"{name} is {what}, and the {kind.__name__} held something else in each call",
            "read it outside of the step: append() alone reads nothing",
            in_each_iteration,
        )
