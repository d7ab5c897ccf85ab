"""Text made of what only the running step knows, and ``print``.

``f"step {n}: loss {loss.item():.4f}"`` is a node of the graph that gives a str. Such a text can be joined, formatted
into another, printed, returned or kept; whatever else would look into it needs its letters, which is a graph break
unless it comes from the call's inputs alone: then today's text is taken, under a guard.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step import texts

from ..guards.sources import Source
from ..heap.records import derived_from, raw_dict
from ..tensors.interfaces import TensorOperators
from ..tensors.numbers import Numbers
from ..values.formulas import AtSource, Formula
from ..values.numbers import Number
from ..values.values import ATOMS, OWN, Break, TensorProxy

WRITING = frozenset(("write", "flush", "__getattribute__", "__getattr__"))  # what decides how it is written to
BUFFERS = (io.BufferedWriter, io.BufferedRandom)
# Classes of ``sys.stdout`` whose ``write`` is not the user's own code.
STREAMS = ("OutStream",)  # Jupyter's; what ``io`` defines is known anyway


class Text(Number):
    """A str at run time, a node of the graph while tracing."""

    __slots__ = ()
    __hash__ = Number.refuse  # else a dict or set of plain texts would not find it


Text.__name__ = f"{OWN}str"


class OperatorsWithNumbers(TensorOperators, Protocol):
    """``tensors.TensorOperations``."""

    numbers: Numbers


class Texts:
    """All texts of one trace."""

    def __init__(self, tensors: OperatorsWithNumbers):
        self.tensors, self.writer, self.guards = tensors, tensors.writer, tensors.guards
        self.inputs: list[Text] = []
        self.being_written: list[int] = []  # by id: lists, tuples and dicts whose items' texts are being made

    @property
    def numbers(self) -> Numbers:
        return self.tensors.numbers

    def is_part(self, value: Any) -> bool:
        """Whether the value is the graph's and has a text."""
        if is_kind(value, Number):
            return value.node is not None
        return is_kind(value, TensorProxy) or type(value) in (torch.SymInt, torch.SymFloat)

    def is_text(self, value: Any) -> bool:
        """Whether the value is a str that the graph makes."""
        return is_kind(value, Text) and value.node is not None

    def is_open(self, *values: Any) -> bool:
        """Whether a text of these values is a node of the graph: one of them is the graph's, the others are plain."""
        return any(map(self.is_part, values)) and all(
            self.is_part(v) or type(v) in ATOMS or is_kind(v, Number) for v in values
        )

    def is_repeated(self) -> bool:
        """Whether this is a graph within the step's, other than a side of a branch on a number of the call, or a
        gradient hook's, which runs where the hook would."""
        scope = self.writer.scope
        if scope.is_never_repeated():
            return False
        return scope.in_loop or not self.tensors.gradients.hooks.interpreting

    def make(self, function: Callable[..., str], *operands: Any) -> Text:
        """``function(*operands)``, one of ``lowering.step.texts``, as a node."""
        if self.is_repeated():
            raise Break("text in a loop or branch", "of what is computed there", "make it after that")
        writer, operands = self.writer, tuple(map(self.numbers.open, operands))
        node = writer.call(function, *writer.with_sizes(operands))
        if any(is_kind(o, TensorProxy) or (is_kind(o, Number) and not o.known) for o in operands):
            return Text(self.numbers, "…", node)
        today = function(*(o.representative if is_kind(o, Number) else o for o in operands))
        return Text(self.numbers, today, node, *self.numbers.again(function, operands))

    def computed(self, today: str, node: Any, sources: tuple[Source, ...], evaluate: Formula) -> Text:
        """What a function of numbers gives."""
        return Text(self.numbers, today, node, sources, evaluate)

    def of_input(self, value: str, source: Source) -> Text:
        """A text that differs from call to call, as an input of the graph."""
        self.guards.check("type", source, str, text="type is str")
        node = self.tensors.add_input(value, value, source).node
        text = Text(self.numbers, value, node, (source,), AtSource(source))
        text.source = source
        self.inputs.append(text)
        return text

    def looked_into(self) -> set[str]:
        """Places of those inputs whose letters the step has needed so far."""
        found = {s.name for n in self.numbers.fixed.values() if is_kind(n, Text) for s in n.sources or ()}
        return found & {t.source.name for t in self.inputs if t.source is not None}

    @contextlib.contextmanager
    def writing(self, display: Any) -> Iterator[None]:
        """While the texts of a container's items are made."""
        if id(display) in self.being_written:
            detail = f"a {type(display).__name__} is in itself"
            raise Break("text of a value that is not plain", detail, "print it after the step")
        self.being_written.append(id(display))
        try:
            yield
        finally:
            self.being_written.pop()

    def formatted(self, value: Any, conversion: str, spec: Any) -> Text:
        return self.make(texts.formatted, value, conversion or "", spec or "")

    def write(self, file: TensorProxy, *text: Any) -> None:
        """``file.write(text)``, or ``file.flush()``, as a node."""
        self.refuse_lines()
        self.writer.call(texts.write if text else texts.flush, file, *text)

    def refuse_lines(self) -> None:
        """A graph break where a line that is written cannot stay between the operators around it."""
        if self.writer.recomputed:
            raise Break("print in a checkpointed call", "backward would print it once more", "print after the call")
        if self.is_repeated():
            raise Break("print in an expert loop", "the order of its iterations would show", "print after the loop")
        if not self.tensors.whole_step:
            raise Break("print", "this backend takes a graph of operators alone", "it runs natively")

    def print(self, file: Any, *values: Any, sep: Any = None, end: Any = None, flush: Any = False) -> None:
        """``print`` of texts, plain values and tensors, as a node: the line stays between the operators around it.
        file: None for what ``sys.stdout`` is then."""
        self.refuse_lines()
        if not all(type(v) in ATOMS or self.is_part(v) or is_kind(v, Number) for v in values):
            raise Break("print", "of values that are not plain", "print numbers, strings and tensors")
        if file is None and not is_stream(sys.stdout):
            raise Break(
                "print", f"sys.stdout is a {type(sys.stdout).__name__}, whose write is not known", "it runs natively"
            )
        if file is None:
            self.guards.holds("sys.stdout", "is a plain stream", lambda: is_stream(sys.stdout))
        self.writer.call(texts.say, file, sep, end, bool(flush), *self.writer.with_sizes(values))


def is_stream(stream: Any) -> bool:
    """Whether writing to the stream is possible, and runs no code of the user's."""
    kind = type(stream)
    if (known := derived_from(kind, (io.TextIOWrapper, io.StringIO))) is None:
        return kind.__name__ in STREAMS and kind.__module__.startswith("ipykernel")
    own = [vars(base) for base in kind.__mro__[: kind.__mro__.index(known)]]
    if not all(WRITING.isdisjoint(names) for names in (raw_dict(stream) or (), *own)):
        return False
    try:
        if known.closed.__get__(stream):
            return False
        below = None if known is io.StringIO else io.TextIOWrapper.buffer.__get__(stream)
        return below is None or type(below.raw if type(below) in BUFFERS else below) in (io.FileIO, io.BytesIO)
    except ValueError:  # of one that was detached from its file
        return False
