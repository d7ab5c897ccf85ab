"""What stands for the rows of a loop while tracing, and the record of a loop whose body is being recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from moebius.interpreter import Frame

from ..torch_facts import torch_private
from ..values.values import Break, TensorProxy
from .branches import OneTurn
from .hit_loops import HitTurns
from .range_loops import RangeRows
from .two_sides import FirstSide, Joined

if TYPE_CHECKING:
    from .gathered import Gathered


class TensorRows:
    """The iterator over the rows of a tensor whose length is not known while tracing.

    numbers: it stands for ``tensor.tolist()`` instead, at once iterated over: rows are Python ints. of_array: they are
    numpy's, of ``tensor.numpy()``.
    """

    def __init__(self, proxy: TensorProxy, numbers: bool = False, of_array: bool = False):
        self.proxy, self.numbers, self.of_array = proxy, numbers, of_array
        self.finished = self.begun = False

    def begin(self) -> TensorRows:
        """``iter(self)``. A list may be iterated over again, which this cannot."""
        if self.begun and self.numbers:
            raise Break("tensor read as a number", "tolist() of a tensor of unknown length", "iterate over the tensor")
        self.begun = True
        return self


ROWS = (TensorRows, RangeRows, HitTurns)
ONE = (OneTurn, HitTurns)  # recorded as loops of one turn


class OpenLoop:
    """A loop whose body is being recorded.

    head: the instruction index where a turn ends: FOR_ITER, or where the sides of an ``if`` meet. inside: the indices
    of a turn. start, begun_with: where the frame was at the loop's first instruction, and its stack; place: the same
    for native code, which may have to ask for a condition's truth; entry: where it goes on from there. stack: that of
    a turn at its ends. before: the frame's locals at the start. carried: indices of the locals that turns pass on.
    root_step: the root frame's step at which it began. lifted: outer nodes that the body uses, each with its
    placeholder; known once the loop is closed.
    """

    def __init__(self, frame: Frame, rows: TensorRows | RangeRows | HitTurns | OneTurn, carried: list[int]):
        self.frame, self.rows, self.carried = frame, rows, carried
        self.start, self.begun_with = frame.pc, list(frame.stack)
        self.place = self.begun_with, self.start
        if isinstance(rows, OneTurn):
            self.head, self.entry, self.inside = rows.end, rows.entry, rows.inside
            self.stack = self.begun_with[:-1]
        else:
            instruction = frame.program.instructions[frame.pc]
            assert instruction.target is not None
            self.head = self.entry = frame.pc
            self.inside, self.stack = range(frame.pc, instruction.target), self.begun_with
        self.before = list(frame.locals)
        self.depth = 0  # of the machine's frames at its first instruction
        self.where: tuple = ()
        self.root_step = 0
        self.number = 0  # of the first node in it
        self.row: fx.Node | None = None
        self.row_value: Any = None
        self.skips: list[list[Any]] = []  # the frame's locals wherever the turn may end within, on another condition
        self.switches = torch_private.switches()
        self.first: FirstSide | None = None  # of the second side of two: what the first one left
        self.joined: list[Joined] = []  # of one side of two: what it gives out
        self.joined_nodes: list[fx.Node] = []
        self.again: Any = None  # of the first side of two: the condition, for the second
        self.put_back = self.before  # the frame's locals where native code would go on
        self.begun: list[Any] = []  # its locals at the turn's beginning
        self.read: set[int] = set()  # indices of the locals that the turn found as they were before the loop
        self.gathered: list[tuple[Gathered | None, TensorProxy]] = []  # what a branch appends, and to which lists
        self.carried_nodes: list[fx.Node] = []
        self.absent_nodes: list[fx.Node] = []  # placeholders of what a branch that is not taken appends
        self.lifted: dict[fx.Node, fx.Node] = {}


    def follow(self, other: OpenLoop, first: FirstSide | None) -> None:
        """Takes the place of the other: where the program came to that, native code would go on for this one, too."""
        self.first, self.root_step, self.place = first, other.root_step, other.place
        self.put_back = other.put_back
