"""Writes down what an attempt at capture goes through, where somebody wants to walk through it later."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from moebius.interpreter import UNSET, Frame, is_kind, opened

from ..bytecode.counting import counted
from ..bytecode.user_code import is_library
from ..codegen.continuation_code import is_own
from ..guards.recorder import GuardRecorder, describe
from ..hook import ABSENT
from ..python.domain import TrackingDomain
from ..values.numbers import Number
from ..values.values import SYMBOLIC, TensorProxy, UndefinedAfterLoop
from .recording import MOST_LINES, Moment, Recording

ITEMS = 4  # of a container that are shown


class Recordings:
    """Those of this process. is_on: whether attempts are written down at all."""

    is_on = False
    kept: list[Recording] = []

    @classmethod
    def mark(cls, code: types.CodeType, node: fx.Node, text: str) -> None:
        """An operator of what was captured of this code gave something else than plain Python did."""
        where = code.co_qualname, code.co_filename, code.co_firstlineno
        for one in cls.kept:
            texts = ((n, words.split(" = ")[0].strip()) for n, words in one.operators)
            number = next((n for n, name in texts if (n, name) == (number_of(node), node.name)), None)
            if number is not None and (one.function, one.file, one.line) == where:
                one.differs = number, text


class Recorder:
    """Of one attempt."""

    def __init__(self, code: types.CodeType, guards: GuardRecorder, domain: TrackingDomain):
        self.recording = Recording(code.co_qualname, code.co_filename, code.co_firstlineno)
        self.facts, self.writer, self.objects = guards.facts, domain.writer, domain.objects
        # of each open frame its newest moment, and the instruction that it is at
        self.newest: weakref.WeakKeyDictionary[Frame, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self.plain: Callable[[Frame], None] = domain.observe
        vars(domain)["observe"] = self.observe

    def observe(self, frame: Frame) -> None:
        self.plain(frame)
        if is_library(frame.code.co_filename):
            return
        instruction = frame.program.instructions[frame.pc]
        if not counted_of(frame.code)[instruction.offset >> 1]:  # what stands before its first line, or is ours
            return
        line = instruction.line
        at, before, place = self.newest.get(frame, (-1, -1, -1))
        if line is not None and (line != before or frame.pc < place):
            at, before = self.add(frame, line), line
        self.newest[frame] = at, before, frame.pc

    def add(self, frame: Frame, line: int) -> int:
        """A moment more; returns its number."""
        moments = self.recording.moments
        if len(moments) >= MOST_LINES:
            self.recording.is_cut = True
            return len(moments) - 1
        parent = next((self.newest[caller][0] for caller in opened(frame.back) if caller in self.newest), None)
        held = [self.objects.seen_in_cell(v) if type(v) is types.CellType else v for v in frame.locals]
        variables = zip(frame.program.localsplus, held, strict=True)
        values = {n: in_words(v) for n, v in variables if v is not UNSET and v is not ABSENT and not is_own(n)}
        code = frame.code
        counts = len(self.facts), self.writer.count
        moments.append(Moment(code.co_filename, line, code.co_qualname, parent, values, *counts))
        return len(moments) - 1

    def keep(self, outcome: str) -> None:
        """The attempt became a capture."""
        recording = self.recording
        recording.guards = list(self.facts)
        recording.operators = sorted(numbered(self.writer.graph, self.writer.submodules), key=lambda each: each[0])
        recording.outcome = outcome
        Recordings.kept.append(recording)


counted_of = functools.lru_cache(256)(counted)


def numbered(graph: fx.Graph, bodies: dict[str, fx.GraphModule], indent: str = "") -> Iterator[tuple[int, str]]:
    """The numbers and texts of the operators of a graph and of the bodies of its loops, which stand indented."""
    for node in graph.nodes:
        if node.op == "get_attr" and (body := bodies.get(str(node.target))) is not None:
            yield from numbered(body.graph, bodies, indent + "    ")
        if (number := number_of(node)) is not None and node.op != "placeholder":
            yield number, indent + as_call(node)


def number_of(node: fx.Node) -> int | None:
    number = node.meta.get("number")
    while is_kind(number, tuple):  # one of several results
        number = number[0]
    return number


def as_call(node: fx.Node) -> str:
    """``mul = mul(x, 2)``: a node as a line of Python would have it."""
    words = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    if node.op == "call_method":
        return f"{node.name} = {words[0]}.{node.target}({', '.join(words[1:])})"
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({', '.join(words)})"


def in_words(value: Any) -> str:
    """A variable's value as the capture knows it; no code of the user's runs for it."""
    if issubclass(type(value), TensorProxy):  # (isinstance asks a proxy of the user's for its class)
        return f"{value.describe()}, node {value.node.name}"
    if issubclass(type(value), Number):
        return f"a {value.kind.__name__} of the graph" + ("" if value.node is None else f", node {value.node.name}")
    if type(value) is UndefinedAfterLoop:
        return "what the loop's last iteration left, not known"
    if type(value) in SYMBOLIC:
        return f"{value.node.expr}, a symbolic size"
    if type(value) in (tuple, list):
        items = [in_words(item) for item in value[:ITEMS]] + ["…"] * (len(value) > ITEMS)
        return f"({', '.join(items)})" if type(value) is tuple else f"[{', '.join(items)}]"
    return describe(value).replace("the same ", "a ")
