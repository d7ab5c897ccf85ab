"""The record of a loop, or of a branch, whose body is being recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from moebius.interpreter import Frame, is_kind
from moebius.lowering.values import same_shape

from ..bytecode.copied_returns import RETURNS
from ..bytecode.counting import Part
from ..bytecode.flow import RETURNED
from ..heap.conditional_writes import Side
from ..heap.places import HeapPlace
from ..tensors.arrays import ArrayNumber
from ..torch_facts import torch_fakes, torch_private
from ..values.numbers import Number
from ..values.rows import TensorRows
from ..values.values import SYMBOLIC, TensorProxy
from .active_experts import ActiveExperts
from .autograd_joins import carried_on
from .branches import Conditional
from .range_loops import RangeRows

ROWS = (TensorRows, RangeRows, ActiveExperts)
ONE = (Conditional, ActiveExperts)  # recorded as loops of one iteration


# The index of a local, or a position in the stack, inverted; then keys of containers. Or a place of the heap.
Place = tuple[Any, ...]


@dataclass
class FirstSide:
    """What the first side left. height: of the stack. joined: tensors. left: what else it set. placed: tensors in the
    heap, by place."""

    height: int
    joined: dict[Place, TensorProxy] = field(default_factory=dict)
    left: dict[Place, Any] = field(default_factory=dict)
    placed: dict[Place, TensorProxy] = field(default_factory=dict)

    def indices(self) -> set[int]:
        return {place[0] for place in (*self.joined, *self.left)}


@dataclass
class Joined:
    """A value that a region gives out. initial: what it is where that does not run; None on the first side of two.
    number: whether it holds a float of Python's, which is read behind the branch."""

    place: Place
    value: TensorProxy
    initial: TensorProxy | None
    number: bool = False

    def fake(self, count: Callable[[Any, Any], Any]) -> torch.Tensor:
        """Of what it is afterwards: what one side of a branch makes anew may have its own rows. count: how many there
        are, where there were so many before, and so many behind."""
        before, after = (one.fake for one in self.ways)
        if self.value is self.initial:
            return before.clone()
        if before.dim() and not same_shape((before.shape[0],), (after.shape[0],)):
            rows = count(before.shape[0], after.shape[0])
            return carried_on(before, after, before.new_empty((rows, *before.shape[1:])))
        return carried_on(before, after)

    @property
    def ways(self) -> tuple[TensorProxy, TensorProxy]:
        """What it may be afterwards."""
        return (self.value if self.initial is None else self.initial), self.value


def fakes_of(loop: LoopRegion, outs: Iterable[Joined], world: torch_fakes.FakeWorld) -> tuple[torch.Tensor, ...]:
    """Of what a region gives out. Of values of which each side of a branch makes as many rows, there are as many."""
    counts: dict[Any, Any] = {}

    def count(before: Any, after: Any) -> Any:
        expression = torch_private.expression
        sides = (expression(before), expression(after)) if is_kind(loop.rows, Conditional) else len(counts)
        if sides not in counts:
            counts[sides] = world.unknown_count()
        return counts[sides]

    return tuple(one.fake(count) for one in outs)


class Appends(Protocol):
    """A list that branches on values append to (``conditional_lists.ConditionalList``)."""

    items: list[tuple[Any, Any]]


class LoopRegion:
    """A loop whose body is being recorded.

    head: the instruction index where an iteration ends: FOR_ITER, or where the sides of an ``if`` meet (RETURNED, where
    that is the function's return). inside: the indices of an iteration. start, begun_with: where the frame was at the
    loop's first instruction, and its stack; place: the same for native code, which may have to ask for a condition's
    truth; entry: where it goes on from there. stack: that of an iteration at its ends. before: the frame's locals at
    the start. carried: indices of the locals that iterations pass on. root_step: the root frame's step at which it
    began. lifted: outer nodes that the body uses, each with its placeholder; known once the loop is closed.
    """

    def __init__(self, frame: Frame, rows: TensorRows | RangeRows | ActiveExperts | Conditional, carried: list[int]):
        self.frame, self.rows, self.carried = frame, rows, carried
        self.start, self.begun_with = frame.pc, list(frame.stack)
        self.place = self.begun_with, self.start
        self.value: Any = None  # of an expression, on the side that gives out the condition
        if isinstance(rows, Conditional):
            self.head, self.entry, self.inside = rows.end, rows.entry, rows.inside
            self.stack = self.begun_with[: -1 - rows.below]
            self.value = self.begun_with[-1]
        else:
            instruction = frame.program.instructions[frame.pc]
            assert instruction.target is not None
            self.head = self.entry = frame.pc
            self.inside, self.stack = frozenset(range(frame.pc, instruction.target)), self.begun_with
        self.before = list(frame.locals)
        self.depth = 0  # of the machine's frames at its first instruction
        self.where: tuple = ()
        self.root_step = 0
        self.number = 0  # of the first node in it
        self.counted = 0  # instructions for the report: the mark as it began
        self.part: Part = (0, 0, False)  # of the body: what is recorded now
        self.row: fx.Node | None = None
        self.row_value: Any = None
        # the frame's locals wherever the iteration may end within, on another condition
        self.skips: list[list[Any]] = []
        self.holds: list[tuple[Any, bool]] = []  # conditions on numbers that are certain in what is recorded now
        self.switches = torch_private.switches()
        self.first: FirstSide | None = None  # of the second side of two: what the first one left
        self.joined: list[Joined] = []  # of one side of two: what it gives out
        self.again: Any = None  # of the first side of two: the condition, for the second
        self.put_back = self.before  # the frame's locals where native code would go on
        self.begun: list[Any] = []  # its locals at the iteration's beginning
        self.read: set[int] = set()  # indices of the locals that the iteration found as they were before the loop
        self.gathered: list[tuple[Appends | None, TensorProxy]] = []  # what a branch appends, and to which lists
        self.since = 0  # the heap's mark as the body began
        self.outer: Any = None  # the ``GraphScope`` around it
        self.side: Side | None = None  # of a branch, if it writes to what is older where it was come to
        self.places: dict[Any, tuple[HeapPlace, Any]] = {}  # of the heap that a branch sets: with what they held before
        self.chosen: dict[Any, tuple[Any, Any]] = {}  # numbers, by place: what this side leaves, and what the other
        self.asked: Any = None  # the condition, for these
        # placeholders: of what is carried; behind the body, of all that is given out, and of what a branch may append
        self.nodes: list[fx.Node] = []
        self.lifted: dict[fx.Node, fx.Node] = {}

    def goes_on_where(self, condition: Any, truth: bool) -> None:
        """What is recorded from here on runs where the condition has this truth."""
        if is_kind(condition, torch.SymInt | torch.SymBool):
            self.holds.append((condition, truth))

    @property
    def stands_at(self) -> dict[str, Any]:
        """What nodes of it say of the user's line."""
        return {"where": self.where[-1] if self.where else ("", 0, ""), "stack": self.where}

    @property
    def skipped(self) -> Part:
        """What runs where the condition that was passed last ends the iteration."""
        number, passed, _ = self.part
        return number, passed - 1, True

    def pass_condition(self) -> None:
        """What is recorded from now on is behind one more condition."""
        number, passed, _ = self.part
        self.part = number, passed + 1, False

    def is_at_end(self) -> bool:
        """Whether the frame is where the iteration ends."""
        frame = self.frame
        if self.head == RETURNED:
            return frame.instruction.opname in RETURNS
        return frame.pc == self.head

    def follow(self, other: LoopRegion, first: FirstSide | None) -> None:
        """Takes the place of the other: where the program came to that, native code would go on for this one, too."""
        self.first, self.root_step, self.place = first, other.root_step, other.place
        self.put_back, self.value = other.put_back, other.value

    def given_out(self) -> list[Joined]:
        """What it carries, and what a side joins."""
        return [*(Joined((i,), self.frame.locals[i], self.before[i]) for i in self.carried), *self.joined]


def times(loops: list[LoopRegion]) -> tuple[int, Part | None]:
    """How often that runs which is recorded in these; where the data decides, in which part."""
    if len(loops) == 1 and type(loops[0].rows) is RangeRows and not loops[0].skips:
        return loops[0].rows.count, None
    return 1, loops[-1].part if loops else None


def on_values(condition: Any) -> bool:
    """Whether only the running step knows the truth of it."""
    if issubclass(type(condition), TensorProxy):
        return condition.fake.numel() == 1
    condition = condition.value if type(condition) is ArrayNumber else condition
    if type(condition) is Number:
        return condition.node is not None and (condition.goes_both_ways or not condition.known)
    return issubclass(type(condition), SYMBOLIC) and torch_private.depends_on_values(condition)


def has_attributes(tensor: TensorProxy) -> bool:
    return bool(tensor.attributes or (is_kind(tensor.real, torch.Tensor) and tensor.real.__dict__))


def alike(before: Any, after: Any, rows: bool = False) -> bool:
    """Whether the one may stand for the other in everything that is known of a tensor before the step runs. rows: how
    many rows it has may be another matter."""
    if not is_kind(before, TensorProxy) or not is_kind(after, TensorProxy):
        return False
    if has_attributes(before) or has_attributes(after):
        return False
    a, b = before.fake, after.fake
    if (a.dtype, a.device, a.layout, before.cls) != (b.dtype, b.device, b.layout, after.cls):
        return False
    first = int(rows and a.dim() > 0)  # (no stride is a number of rows)
    return same_shape(tuple(a.shape[first:]), tuple(b.shape[first:])) and same_shape(a.stride(), b.stride())


def reorder_placeholders(body: fx.GraphModule, loop: LoopRegion) -> None:
    """Body placeholders stand in the order (row, carried, captures); lifted ones were added as they were met."""
    assert loop.row is not None
    wanted = [loop.row, *loop.nodes, *loop.lifted.values()]
    assert len(wanted) == sum(node.op == "placeholder" for node in body.graph.nodes)
    anchor = None
    for node in wanted:
        if anchor is not None:
            anchor.append(node)
        anchor = node
    body.recompile()
