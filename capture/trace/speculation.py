"""Branches on data inside a graph: the graph holds one way, and a side exit for the other.

Whether Python takes ``if not found_inf:`` is known when the step runs. The trace goes on as if the answer were
certain; a node in the graph holds the data to it, and raises where it is otherwise. What ran until then has run as
plain Python would have. The side exit, made when the step was captured, then replays the effects on Python objects
up to the branch and goes on natively in every open frame, the innermost at its branch. (This is what just-in-time
compilers call deoptimization: Hölzle, Chambers, Ungar, "Debugging optimized code with dynamic deoptimization", 1992.)

Only a branch that can be gone on from is speculated on; the others break the graph.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.interpreter import NULL, Frame, is_kind
from moebius.lowering import only_computes, writes_into
from moebius.lowering.step import require_branch

from ..bytecode.counting import Counts
from ..bytecode.expressions import span_of
from ..bytecode.flow import RETURNED, run_again_by
from ..bytecode.stack_layout import run_again
from ..codegen.continuation_code import CannotResume
from ..codegen.effect_replay import EffectReplay
from ..codegen.residual import Emitter
from ..regions.branches import BRANCHES, LEAVING, past_jumps
from ..tensors.arrays import Array, ArrayNumber
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import ATOMS, CannotRebuild, SymbolicObject, TensorProxy, is_of_one_number
from .attempt import Attempt
from .frame_snapshots import FrameSnapshot, connected, continuation
from .lost_values import apply_here
from .may_raise import can_ask_again

MAX_EXITS = 512  # in one graph; each costs a continuation at capture, and a read from the device when it runs
MAX_PEEKED = 64  # operators that are run ahead to see which way a branch will go
MAX_FOLLOWED = 16  # times in a row that a branch is taken to go as it went before: `while` would never end
MAX_UNTOLD = 4  # times that a branch in a ``while`` loop may be met of which data told nothing: see ``endless``
# Instructions that ask for the truth of the value on top of the stack and do nothing else before.
ASK_TOP = frozenset({"UNARY_NOT", "TO_BOOL", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"})
LOOKS = (enumerate, zip, len, iter)  # that ask an array of numpy's for its length, and do nothing before
EXTREMES = (max, min)  # that compare, and ask what they compared
ASK_PREFIX = "POP_JUMP_"


class Held(threading.local):
    """The values that a side exit goes on with, in place of a graph that computes them."""

    values: tuple[Any, ...] = ()

    def __call__(self) -> tuple[Any, ...]:
        values, self.values = self.values, ()
        return values


@dataclass
class SideExit:
    """Where a graph is left when a branch goes the other way. place: as the graph's node names it.

    file, line: the user's. expected: the way that the graph holds. ends: whether it ends a ``while`` loop. counts: the
    user's instructions up to the branch.
    """

    place: str
    file: str
    line: int
    expected: bool
    run: Callable[..., Any]
    held: Held
    ends: bool
    counts: Callable[[], Counts]

    def go_on(self, live: tuple[Any, ...], args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Replay the effects before the branch; the result goes on from there."""
        self.held.values = live
        return self.run(*args, **kwargs)


class Speculation:
    """The branches on data of one trace."""

    def __init__(self, trace: Attempt):
        self.trace, self.writer = trace, trace.writer
        self.domain, self.tensors = trace.domain, trace.tensors
        self.lists = self.domain.lists
        self.exits: dict[str, SideExit] = {}
        self.newest = -1  # the root's step in which the newest of them was made
        self.met: Counter[str] = Counter()
        self.went: dict[str, bool] = {}  # by branch: the last way that data told
        self.followed: Counter[str] = Counter()
        self.untold: Counter[str] = Counter()
        # Branches in ``while`` loops of which data told nothing, again and again. Nobody knows how many iterations
        # there will be (``generate``), so that these are captured one by one.
        self.endless: set[str] = set()

    def decide(self, value: Any) -> bool | None:
        """The way that the trace takes at a branch on ``value``; None: no graph can hold this branch."""
        trace = self.trace
        writer = trace.writer
        if writer.scope.parent is not None or writer.recomputed or trace.domain.loops.open:
            return None
        if len(self.exits) >= MAX_EXITS or trace.objects.inside:
            return None
        frames = trace.frames()
        innermost = frames[-1]
        if not asks_alone(innermost, value) or len(connected(frames)) < len(frames):
            return None
        code, line = innermost.frame.code, line_of(innermost.frame, innermost.pc)
        branch = name_of(innermost.frame, innermost.pc)
        if branch in trace.assumptions.unpredictable:
            return None
        self.met[branch] += 1
        place = f"{branch}, {self.met[branch]}"
        expected = trace.assumptions.predictions.get(place)
        if torch_private.is_made_of(value, trace.domain.arrays.lengths):
            expected = True  # nothing can be followed the other way
        else:
            expected = self.way(branch, value, expected)
            if self.untold[branch] > MAX_UNTOLD and any(is_in_while(f.frame, f.pc) for f in frames):
                self.endless.add(branch)
                return None
        leaves = expected == without_error(innermost.frame, innermost.pc) and unhandled(frames)
        if trace.gradients.waiting() and not leaves:
            return None  # the other way may change what a backward in it reads
        held = Held()
        try:
            emitter, run = self.side_exit(frames, held)
        except (CannotRebuild, CannotResume):
            return None
        trace.objects.heap.read("fact", None, "branch", None)
        writer.call(require_branch, value, expected, place, *emitter.outputs)
        ends = ends_while(innermost.frame, innermost.pc)
        counts = trace.counter.so_far([run_again(innermost.frame, innermost.pc, innermost.pc + 1)])
        self.newest = trace.domain.root_steps - 1
        self.exits[place] = SideExit(place, code.co_filename, line, expected, run, held, ends, counts)
        return expected

    def side_exit(self, frames: list[FrameSnapshot], held: Held) -> tuple[Emitter, Callable[..., Any]]:
        emitter, request = self.emitter(), self.trace.request
        native = continuation(emitter, frames, "run", None)
        EffectReplay(emitter).effects()
        return emitter, emitter.function(request.function.__name__, held, [], native)

    def emitter(self) -> Emitter:
        request = self.trace.request
        return Emitter(self.trace.objects, len(request.args), tuple(request.kwargs))

    def live(self) -> tuple[Any, ...]:
        """What Python goes on with after the call that the innermost frame makes, which gives nothing."""
        frames = self.trace.frames()
        if len(connected(frames)) < len(frames):
            return ()
        return self.read_by(lambda emitter: continuation(emitter, frames, "call", gives_nothing)) or ()

    def live_before(self) -> tuple[Any, ...] | None:
        """What Python goes on with before the instruction that the innermost frame is at; None where it cannot."""
        frames = self.trace.frames()
        chain = connected(frames, generators=True)
        if len(chain) < len(frames) or not can_ask_again(chain[-1]):
            return None
        return self.read_by(lambda emitter: continuation(emitter, chain, "run", None))

    def leaving(self) -> tuple[Any, ...] | None:
        """What a trace that came to its end gives and leaves behind; None where that cannot be said."""
        return self.read_by(lambda emitter: emitter.value(self.trace.result))

    def read_by(self, write: Callable[[Emitter], Any]) -> tuple[Any, ...] | None:
        """What the code that `write` makes reads, and that of the effects; None where there can be none."""
        emitter = self.emitter()
        try:
            write(emitter)
            EffectReplay(emitter).effects()
        except (CannotRebuild, CannotResume):
            return None
        return tuple(emitter.outputs)

    def way(self, branch: str, value: Any, told: bool | None) -> bool:
        """The way that data told in an earlier call, or will take in this one; else the one that the same branch took
        before; else the one that ends in no ``raise``, else that nothing is wrong, as branches on data mostly ask. A
        wrong guess costs time only."""
        told = self.peek(value) if told is None else told
        self.untold[branch] += told is None
        if told is not None:
            self.went[branch], self.followed[branch] = told, 0
        elif branch in self.went and self.followed[branch] < MAX_FOLLOWED:
            told, self.followed[branch] = self.went[branch], self.followed[branch] + 1
        else:
            innermost = self.trace.frames()[-1]
            told = without_error(innermost.frame, innermost.pc)
            if told is None:
                told = torch_private.is_made_of(value, self.lists.counts) or is_of_all(value)
        return told

    def peek(self, value: Any) -> bool | None:
        """The way that this call's data will take, where few operators on the call's inputs decide it."""
        real = {p.node: p.real for p in self.tensors.inputs}
        done: dict[fx.Node, Any] = {}

        def run(node: fx.Node) -> Any:
            if node in real:
                return real[node]
            if node not in done:
                written = any(node in writes_into(user) for user in node.users)
                if len(done) >= MAX_PEEKED or written or not only_computes(node):
                    raise LookupError(node.name)
                done[node] = None
                args, kwargs = fx.map_arg(node.args, run), fx.map_arg(node.kwargs, run)
                done[node] = apply_here(node, args, kwargs)
            return done[node]

        try:
            with torch.no_grad():
                return bool(fx.map_arg(self.writer.argument(value), run))
        except Exception:  # whatever it is, the step itself will meet it
            return None


def is_of_all(value: Any) -> bool:
    """Whether it asks if something holds everywhere, as ``if not valid.all(): raise …``: nothing goes wrong then."""
    node: Any = value.node if is_kind(value, TensorProxy | Number) else None
    if node is not None and node.target == "item":
        node = node.args[0]
    return is_kind(node, fx.Node) and node.target in ("all", torch.all, torch_private.IS_ALL_TRUE)


def gives_nothing() -> None:
    """In a call's place."""


def asks_alone(place: FrameSnapshot, value: Any) -> bool:
    """Whether the frame's instruction does nothing before it asks for the truth of ``value``: it can run once more."""
    instruction, stack = place.frame.program.instructions[place.pc], place.stack
    if not stack:
        return False
    if instruction.opname in ASK_TOP or instruction.opname.startswith(ASK_PREFIX):
        return stack[-1] is value or is_kind(stack[-1], SymbolicObject)
    if instruction.opname == "COMPARE_OP":  # 3.13 asks in the comparison itself
        plain = (TensorProxy, Number, ArrayNumber, torch.SymInt, torch.SymFloat)
        return all(is_kind(v, plain) or type(v) in ATOMS for v in stack[-2:])
    if instruction.opname == "GET_ITER":
        return is_kind(stack[-1], Array)
    position = place.callee_position()
    if position is not None and stack[position] in EXTREMES:
        operands = [v for v in stack[position + 1 :] if v is not NULL]
        return len(operands) > 1 and all(map(is_of_one_number, operands))
    if position is not None and stack[position] in LOOKS and any(is_kind(v, Array) for v in stack[position + 1 :]):
        return True
    return position is not None and stack[position] is bool and stack[-1] is value


def while_loops(frame: Frame, pc: int) -> list[frozenset[int]]:
    """The loops around the instruction that no iterator ends. Their conditions are compiled twice, once before them."""
    instructions = frame.program.instructions
    return [
        run_again_by(frame.program, index)
        for index, step in enumerate(instructions)
        if step.target is not None
        and step.target - 1 <= pc <= index
        and instructions[step.target].opname != "FOR_ITER"
    ]


def is_in_while(frame: Frame, pc: int) -> bool:
    """Whether the instruction is in a loop that no iterator ends."""
    return any(pc in loop for loop in while_loops(frame, pc))


def ends_while(frame: Frame, pc: int) -> bool:
    """Whether the truth that the instruction asks for, or the jump behind it, is whether such a loop goes on."""
    instructions = frame.program.instructions
    jump = pc if instructions[pc].opname in BRANCHES else pc + 1
    if instructions[jump].opname not in BRANCHES:
        return False
    ways = [past_jumps(frame, way) for way in (jump + 1, instructions[jump].target) if way is not None]
    return any(len({way in loop for way in ways}) == 2 for loop in while_loops(frame, jump))


def without_error(frame: Frame, pc: int) -> bool | None:
    """The truth on which the program does not go straight on to a ``raise``; None if neither way or both do."""
    instructions = frame.program.instructions
    jump = pc if instructions[pc].opname in BRANCHES else pc + 1
    step = instructions[jump]
    if step.opname not in BRANCHES or step.target is None or instructions[pc].opname == "UNARY_NOT":
        return None
    jumps, falls = (goes_on_to_raise(frame, past_jumps(frame, way)) for way in (step.target, jump + 1))
    return None if jumps == falls else BRANCHES[step.opname] is not jumps


def unhandled(frames: list[FrameSnapshot]) -> bool:
    """Whether an error here leaves all of them, and nothing in them sees it."""
    return all(f.frame.program.handler_at(f.pc) is None for f in frames)


def goes_on_to_raise(frame: Frame, index: int) -> bool:
    """Whether a ``raise`` comes before any other way out, and before any jump."""
    for step in frame.program.instructions[index:] if index != RETURNED else ():
        if step.opname.startswith(LEAVING) or step.target is not None:
            return step.opname.startswith("RAISE_")
    return False


def name_of(frame: Frame, pc: int) -> str:
    """A branch by its place in the user's text: a ``while`` statement's condition is compiled twice, and what goes on
    after a graph break has other instructions."""
    code = frame.code
    span = span_of(code, frame.program.instructions[pc].offset)
    return f"{code.co_filename}:{line_of(frame, pc)} in {code.co_qualname}, at {span or pc}"


def line_of(frame: Frame, pc: int) -> int:
    return frame.program.instructions[pc].line or frame.code.co_firstlineno
