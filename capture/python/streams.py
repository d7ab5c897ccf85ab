"""Text that a step writes to a file: ``f.write(text)``, ``print(…, file=f)``, ``f.flush()`` are nodes in their places.

The file is an input of the graph, so that the same graph writes to another one of its kind. What stands in it tracing
does not know: all else that is asked of a file is a graph break behind what was written.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from moebius.interpreter import is_kind

from ..hook import ABSENT
from ..values.values import Break, SymbolicObject, TensorProxy
from .parts import Parts
from .texts import Text, is_stream

NATIVELY = "it runs natively; the graph goes on after it"


class Written(SymbolicObject):
    """What ``f.write(text)`` gives: how many letters the text has."""

    __slots__ = ()
    kind = int

    def refuse(self, what: str) -> NoReturn:
        raise Break("print", f"{what} of how many letters were written", "take len() of the text")


class Streams:
    """The files that one trace writes to."""

    def __init__(self, domain: Parts):
        self.objects, self.tensors = domain.objects, domain.tensors
        self.guards, self.texts = self.objects.guards, self.tensors.texts
        self.inputs: dict[int, TensorProxy] = {}  # by id of the record

    def call(self, stream: Any, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of a file; ABSENT where it is no node."""
        count = {"write": 1, "flush": 0}.get(name)
        if count != len(args) or kwargs or not is_stream(stream) or not all(map(self.is_text, args)):
            return ABSENT
        self.texts.write(self.input(stream), *args)
        if not args:
            return None
        return len(args[0]) if type(args[0]) is str else self.objects.made(Written())

    def is_text(self, value: Any) -> bool:
        return type(value) is str or is_kind(value, Text)

    def input(self, stream: Any) -> TensorProxy:
        """The file as an input of the graph."""
        record = self.objects.record_of(stream)
        if record is None or not is_stream(stream):
            raise Break("print", f"to a {type(stream).__name__}, whose write is not known", NATIVELY)
        self.objects.note("stream")
        if (known := self.inputs.get(id(record))) is not None:
            return known
        self.guards.holds(record.source.name, "is a plain stream", is_stream, record.source)
        name = f"stream {len(self.inputs)}"  # (stands for it in the graph, which must not hold it)
        return self.inputs.setdefault(id(record), self.tensors.add_input(stream, name, record.source))

    def print(self, *values: Any, file: Any = None, **options: Any) -> None:
        """``print``: to the stream that ``sys.stdout`` is when the graph runs, or to a file."""
        record = self.objects.record_of(vars(sys))
        if file is None and record is not None and record.changed:
            raise Break("print", "after the step changed the sys module", "it runs natively")
        self.texts.print(None if file is None else self.input(file), *values, **options)
