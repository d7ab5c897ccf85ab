"""Places that hold something else in each call, where what they hold decides: nothing general can be said of it.

After some captures that each met another text, tuple, object or number there, the frame holds the value as a thing of
which only the type is known. It may be kept, passed on and returned; what asks for more is a graph break, and what
stands before and after it is captured once.

So are containers: a list of losses, a deque of the last hundred. To append to them reads nothing. What reads one as a
whole (``len``, ``sum``, ``torch.stack``, an item of a list) is a guard on all that it holds. A frame with a loop over
one runs natively as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from moebius.lowering.step.filters import recorders

from ..guards.sources import Source
from ..values.unfollowed import Varying
from ..values.values import Break
from .records import CONTAINERS, Record

if TYPE_CHECKING:
    from ..guards.recorder import GuardRecorder

REASON = "value that varies from call to call"
IN_EACH_TURN = "each turn of the loop would be a graph break"


class VaryingPlaces:
    """Part of ``Objects``. varying: by the name of such a place, what was met there, in words, and a hint.

    tell: called with the name of one that is needed now, before the graph break.
    """

    guards: GuardRecorder
    new: dict[int, Any]
    varying: dict[str, tuple[str, str]]
    tell: Callable[[str], None]

    def made(self, obj: Any) -> Any:
        raise NotImplementedError

    def varies(self, value: Any, source: Source) -> bool:
        """Whether it stands for itself alone: a container may still be written to, a tensor has no value here."""
        if source.name not in self.varying or source.static:
            return False
        return type(value) not in CONTAINERS and not isinstance(value, torch.Tensor)

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
        raise Break(REASON, f"{name} was {met}, and the step needs its value here", hint)

    def is_growing(self, record: Record) -> bool:
        """Whether it is one of these, and this call has not read it as a whole."""
        return record.source.name in self.varying and record.shadow is None

    def refuse_recorder(self, record: Record) -> None:
        """A graph break where the items are read of a list to which every warning of the graph's is added."""
        if type(record.obj) is list and any(one is record.obj for one in recorders()):
            detail = f"{record.source.name} is read, and the block that records in it is open or was left just now"
            raise Break("warnings that were recorded", detail, "read it after the step")

    def refuse_growing(self, record: Record) -> None:
        """A graph break where one of these is to be read as a whole."""
        self.refuse_if_growing(record, "read as a whole")

    def refuse_loop(self, record: Record) -> None:
        """The same where a loop is to go through one."""
        self.refuse_if_growing(record, "gone through", IN_EACH_TURN)

    def refuse_if_growing(self, record: Record, what: str, in_each_turn: str = "") -> None:
        if self.is_growing(record):
            kind = type(record.obj).__name__
            self.tell(record.source.name)
            raise Break(
                "container that changes from call to call",
                f"{record.source.name} is {what}, and the {kind} held something else in each call",
                "read it outside of the step: append() alone reads nothing",
                in_each_turn,
            )
