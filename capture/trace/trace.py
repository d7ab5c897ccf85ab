"""One cold capture: run the machine over a frame with the tracking domain, and say how far it came.

A trace ends with the frame's return, or with a graph break at one instruction of the frame. A break that is noticed
deep inside a call belongs to the root frame's instruction that was running: the frame is traced again from its start
and stopped just before it, so that nothing of the half-done instruction is in the graph. Tracing leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import types
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from moebius.interpreter import UNSET, Frame, InterpreterError, Machine, Signal, decode, is_kind, opened

from ..bytecode.counting import Counts
from ..bytecode.expressions import Place
from ..bytecode.stack_layout import handled_places, run_again
from ..bytecode.user_code import is_library, is_ours, shown_code
from ..codegen.native_parts import NativePart
from ..errors import CaptureInternalError
from ..guards.recorder import GuardRecorder
from ..guards.sources import Arg, Source
from ..heap.objects import COUNTERS, Objects
from ..heap.records import Record
from ..python.caught import is_of_fakes
from ..python.domain import OwnError, StopHere, TrackingDomain
from ..regions.iteration_reuse import IterationReuse
from ..report.records import FAKES, GraphBreak
from ..tensors import tensor_class
from ..tensors.arrays import Array
from ..tensors.deferred_state import DeferredState
from ..tensors.graphs import GraphWriter, Where
from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_fakes, torch_private
from ..values.numbers import Number
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.opaque_tensor import OpaqueTensor, UnfollowedTensor, uses_one
from ..values.values import TRACING, Break
from .assumed_sizes import AssumedSizes
from .assumptions import Assumptions
from .blockers import blocked
from .frame_snapshots import FrameSnapshot
from .may_raise import is_in_handler, raised, refuse_lost_handler
from .native_pieces import why_whole
from .provenance import place_of, said_of, shown_at, where_data_choose
from .recorder import Recorder, Recordings
from .request import Request
from .speculation import Speculation

MAX_BRANCHES = 8  # that are tried with a side exit one after another
DATA_BREAKS = ("data-dependent branch", "tensor read as a number", Array.reason)
ASK_NUMBERS = (*DATA_BREAKS, "size that depends on values", "data-dependent operator")


class TracingMachine(Machine):
    """Knows whether the program has raised anything."""

    raised = False
    domain: TrackingDomain

    def unwind(self, frame: Frame, exc: BaseException) -> bool:
        self.raised = self.raised or not is_kind(exc, Signal | InterpreterError)
        self.domain.sees_raised(exc, again=exc is self.propagating)
        return super().unwind(frame, exc)

    def reenter(self, frame: Frame, thrown: list[BaseException] | None) -> Any:
        self.domain.goes_on(frame)
        return super().reenter(frame, thrown)


class Trace:
    """The state of one attempt, and then its outcome: ``result``, or ``graph_break`` with the stopped ``frame``."""

    def __init__(
        self, request: Request, assumptions: Assumptions, stop_at: int | None = None, stop_number: int | None = None
    ) -> None:
        self.request, self.assumptions, thin = request, assumptions, assumptions.takes_ones
        self.began_with = assumptions.copied()  # what later attempts learn changes the sets of ``assumptions``
        self.world = torch_fakes.FakeWorld(assumptions.runs_here, self.line, thin, assumptions.on_a_mesh)
        self.guards = GuardRecorder(self.line)
        self.writer = GraphWriter(self.world, self.where)
        self.tensors = TensorOperations(self.world, self.writer, self.guards, assumptions.dims, assumptions.whole_step)
        self.tensors.assume(assumptions)
        self.texts, self.numbers = self.tensors.texts, self.tensors.numbers
        self.objects = Objects(
            self.guards, self.tensors.input, self.symbolic, assumptions.open_places(), self.tensors.proxies
        )
        self.objects.assume(self.began_with.logs, assumptions.varying, self.tell_below, self.numbers)
        self.numbers.refuse_varying, self.numbers.small = self.objects.refuse_varying, self.began_with.small
        self.tensors.unread = self.objects.is_entered
        self.heap = self.objects.heap
        gradients = self.gradients = self.tensors.log_to(self.heap, assumptions.outside)
        self.made = DeferredState(gradients.made_state)  # out of its place but while this attempt runs
        self.tensors.is_handled = self.is_handled
        domain = self.domain = TrackingDomain(self.objects, self.tensors)
        domain.stop_at, self.counter = stop_at, domain.counter
        domain.array_inputs.continues = assumptions.continues
        domain.handles_errors = lambda: any(map(is_in_handler, opened(self.machine.frame)))
        loops, bounds, self.inference = domain.loops, domain.bounds, domain.calls.inference
        bounds.elsewhere = assumptions.unrolled
        self.inference.allowed = not assumptions.inference_breaks
        gradients.casts += assumptions.casts
        gradients.natively, gradients.strict = assumptions.natively, assumptions.strict
        if assumptions.each_module:
            domain.blocks = None
        domain.iterations = None if domain.blocks is None else IterationReuse(domain.blocks)
        domain.compiling_for = assumptions.compiling_for
        domain.options = assumptions.options
        loops.unrolled, self.numbers.deciding = assumptions.unrolled, assumptions.deciding
        loops.sized.unrolled, domain.sizes.met = assumptions.unrolled, assumptions.lengths
        loops.by_number = assumptions.by_number - assumptions.not_by_number
        loops.not_by_number = assumptions.not_by_number
        domain.lists.sites = assumptions.gathered - assumptions.not_gathered
        self.machine = TracingMachine(domain)
        tensor_class.guard(self.guards)
        self.handled = sys.exception()  # by the caller
        self.shows_context = False  # whether the caller's is seen on an exception of the program's
        self.state = torch_private.global_state()
        self.result: Any = UNSET
        self.frame: Frame | None = None
        self.graph_break: GraphBreak | None = None
        self.whole_natively = ""  # why the frame does not go on after its break, but runs natively as a whole
        self.chooses = False  # whether it breaks where data choose an item: a loop around it would break each time
        self.raises_by = ""  # where the break's instruction must raise, whatever the data: by whose word
        self.native: NativePart | None = None  # what runs the broken instruction
        self.root_step = 0
        self.recorder: Recorder | None = None
        self.in_branches: set[tuple[types.CodeType, int]] = set()  # one-iteration loops that the break is in
        self.in_hits: set[tuple[types.CodeType, int]] = set()  # loops over rows that the break is in
        self.places: dict[tuple[int, int], Place] = {}  # of instructions, by code and number
        self.tried: Counter[tuple[types.CodeType, int]] = Counter()  # where operators are tried that may fail
        self.stopped: list[FrameSnapshot] = []  # outermost first, where ``stop_number`` was reached
        self.speculation = Speculation(self)
        AssumedSizes(self, self.world, self.speculation.live_before)
        gradients.live, gradients.holds_live = self.speculation.live, assumptions.holds_live
        if assumptions.speculates:
            self.tensors.speculate = self.speculation.decide
        if stop_number is not None:
            self.domain.switches = {}
            self.writer.stop_number = stop_number
            self.writer.before_node = lambda number, *_: self.stop() if number == stop_number else None
        else:
            self.writer.before_node = lambda number, *call: refuse_lost_handler(self, *call)

    def release(self) -> None:
        """The end of an attempt, of which only ``graph_break`` stays: the user's objects are let go now.

        The parts refer to one another: without this, the first batch would live until a garbage collection.
        """
        machine = self.machine
        machine.frame, machine.exc_item = None, [None, None]  # generators that die now ask it
        machine.propagating = machine.clean = None
        self.heap.release()
        for part in (self.domain.blocks, self.domain.iterations, self.domain, self.objects, self.tensors):
            if part is not None:
                vars(part).clear()
        self.guards.let_go()
        self.world.let_go()
        self.made.park()  # but for what a graph holds now
        self.request, self.made = Request(self.request.function, (), {}), DeferredState([])
        self.frame, self.result, self.recorder, self.handled, self.stopped = None, None, None, None, []

    # ------------------------------------------------------------------------------------------------------------------
    # Where the user's program is
    # ------------------------------------------------------------------------------------------------------------------

    def where(self) -> tuple[Where, ...]:
        """The user's stack, outermost first. (What stands in for a function of a library's is no frame of it.)"""
        places: list[Where] = []
        known, frame = self.places, self.machine.frame
        while frame is not None:
            key = id(frame.code), frame.pc  # (which its place keeps alive)
            place = known.get(key) or known.setdefault(key, place_of(frame, frame.pc))
            if not is_ours(place[0]):
                places.append(place)
            frame = frame.back
        return tuple(reversed(places))

    def line(self) -> tuple[str, int]:
        """The user's line: not one of torch's, the standard library's or ours that it has called."""
        frame = next((one for one in opened(self.machine.frame) if not is_library(one.code.co_filename)), None)
        if frame is None:
            code = shown_code(self.request.function)
            return code.co_filename, code.co_firstlineno
        return frame.code.co_filename, frame.line or frame.code.co_firstlineno

    def is_handled(self) -> bool:
        """Whether a handler of the user's would see an error that is raised now."""
        for frame in opened(self.machine.frame):
            handler = frame.program.handler_at(frame.pc)
            if handler is not None and frame.program.instructions[handler[0]].opname == "PUSH_EXC_INFO":
                return True
        return False

    # ------------------------------------------------------------------------------------------------------------------
    # Running
    # ------------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Interpret the frame to its end or to a graph break."""
        outer = getattr(TRACING, "where", None), getattr(TRACING, "frame", None)
        TRACING.where, TRACING.frame = self.where, lambda: self.machine.frame
        try:
            with self.world.answering():
                self.interpret()
        except OwnError as error:  # from the last resort, which asks whose error it is
            raise CaptureInternalError(str(error)) from error
        finally:
            TRACING.where, TRACING.frame = outer
            self.made.park()
        self.world.forget_pending()

    def interpret(self) -> None:
        mode = torch_private.user_mode()
        if mode is not None:
            detail = f"a {type(mode).__name__} sees each operator"
            self.not_entered(Break("mode", detail, "it runs natively, so that the mode sees what plain Python does"))
            return
        if torch_private.in_function_transform():
            detail = "it is called inside of torch.func.grad, vmap or the like"
            self.not_entered(Break("function transform", detail, "it runs natively; capture what calls the transform"))
            return
        with torch_private.preserved_state(), torch_private.as_first_rank(), contextlib.closing(self.inference):
            try:
                frame = self.frame = self.enter_frame()
            except Break as stop:
                self.not_entered(stop)
                return
            self.domain.root = frame
            if Recordings.is_on:
                self.recorder = Recorder(frame.code, self.guards, self.domain)
            try:
                self.result = self.machine.run(frame)
            except OwnError as error:
                raise CaptureInternalError(str(error)) from error
            except StopHere:
                pass  # nothing of the instruction has run
            except Break as stop:
                self.broke(stop)
            except InterpreterError as error:
                self.broke(Break("interpreter", str(error.reason), "please report this"))
            except BaseException as error:
                if not is_kind(error, Exception) and not self.objects.is_known(error):
                    raise  # a signal handler's: KeyboardInterrupt and the like end the call
                if os.environ.get("MOEBIUS_DEBUG"):
                    traceback.print_exception(error)
                self.broke(raised(self.domain, error), error)

    def tell_below(self, name: str) -> None:
        """A place that varies is needed now, which is a graph break: the open calls, which will be captured apart, know
        it by the names that it has there."""
        for frame in [*opened(self.machine.frame)][:-1]:
            known = self.assumptions.of_code(frame.code)
            for local, value in zip(frame.program.localsplus, frame.locals, strict=True):
                place = self.place_of(value)
                if place == name or (place and name.startswith((f"{place}.", f"{place}["))):
                    known[f"L[{local!r}]{name[len(place) :]}"] = self.assumptions.varying[name]

    def place_of(self, value: Any) -> str:
        """The name of the place at which a value was found, "" for none."""
        source: Source | None = None
        if is_kind(value, OpaqueTensor | Number):
            source = value.source
        elif type(value) is torch.SymInt:
            source = next((p.source for p in self.tensors.inputs if p.fake is value), None)
        elif (record := self.objects.record_of(value)) is not None:
            source = record.source
        return "" if source is None else source.name

    def stop(self) -> None:
        """Leave the trace where it is."""
        self.stopped = self.frames()
        if loops := self.domain.open_loops:  # they are as they were before these
            self.writer.scope = loops[0].outer
        raise StopHere

    def frames(self) -> list[FrameSnapshot]:
        """The open frames, outermost first, as they were before the instructions that they are in."""
        stacks, loops = self.domain.stacks, self.domain.open_loops
        frames = [*opened(self.machine.frame)][::-1]
        if loops and loops[0].frame in frames:  # half an iteration of an expert loop: before the loop
            del frames[frames.index(loops[0].frame) + 1 :]
            loops[0].frame.locals[:] = loops[0].put_back
            stacks[loops[0].frame] = loops[0].place
        handled = self.machine.exc_item[0]
        found: list[FrameSnapshot] = []
        for frame in reversed(frames):
            stack, pc = stacks[frame]
            found.insert(0, FrameSnapshot(frame, stack, pc, handled, self.domain.making.get(frame)))
            if places := handled_places(frame.code)[pc]:
                handled = stack[places[0]]
        return found

    def not_entered(self, stop: Break) -> None:
        """An argument is not understood: there is no frame to go on from, the call runs natively."""
        (file, line), name, detail = self.line(), self.request.name, self.world.told(stop.detail)
        self.clean, stack = True, ((file, line, name),)
        self.graph_break = GraphBreak(stop.reason, detail, stop.hint, file, line, name, "the call", stack)

    def broke(self, stop: Break, error: BaseException | None = None) -> None:
        """Record the break; the frame is put back to the state before the root's running instruction.

        error: what the step raises, if that is why.
        """
        domain, frame = self.domain, self.frame
        assert frame is not None
        of_fakes = error is not None and not self.objects.is_known(error) and is_of_fakes(error)
        raised = None if error is None else domain.taken_back(error)
        stack = stop.places or (place_of(frame, domain.root_pc if raised is None else raised[2]),)
        expression, came_from = shown_at(stack, stop.frame, self.objects, self.writer)
        entered = stop.reason == "breakpoint"  # a debugger is to find each frame's locals, and to step through it
        alone = len(stack) == 1 or entered or bool(self.objects.dying)  # (a caller's piece would hold what is to die)
        self.whole_natively = why_whole(stop, frame, domain.root_pc, alone, self.request)
        if len(stack) == 1 and uses_one(domain.root_stack, frame.program.instructions[domain.root_pc].arg):
            self.whole_natively = "such a tensor is used in it"
        self.root_step = domain.root_steps - 1
        self.in_branches, self.in_hits = domain.loops.open_branches(), domain.loops.open_hits()
        outermost = next(iter(domain.loops.open), None)
        if outermost is not None and outermost.frame is frame:
            self.root_step = outermost.root_step  # half a loop is no graph: the whole loop runs natively
        self.gradients.left()
        self.clean = domain.marks == (self.objects.writes, self.writer.count) and not domain.loops.open
        if raised is not None:  # Python raises it where the step does, for its handlers and its traceback
            _, step, domain.root_pc, _ = raised
            if outermost is None or outermost.frame is not frame or step < outermost.root_step:
                self.root_step = step
            self.clean = False
        if stop.reason == "exception" and outermost is None and self.speculation.newest < self.root_step:
            self.raises_by = FAKES if of_fakes else "capture"
        frame.stack[:], frame.pc = domain.root_stack, domain.root_pc
        chooser = where_data_choose(stop, stack)
        self.chooses = chooser is frame
        said = said_of(stop, stack, frame, self.world.told, chooser is not None)
        self.graph_break = GraphBreak(*said, excerpt=expression, origins=came_from)

    def counts(self) -> Counts:
        """The user's instructions that the graph stands for: up to the break, without what only prepares its call."""
        counter, frame = self.counter, self.frame
        if self.graph_break is None:
            return counter.so_far()()
        counter.drop()
        return (counter.so_far() if frame is None else counter.so_far([run_again(frame, frame.pc, frame.pc)]))()

    @property
    def asks_data(self) -> bool:
        """Whether it was a branch on data that ended the graph."""
        return self.graph_break is not None and self.graph_break.reason in DATA_BREAKS

    def deciding_branches(self) -> set[tuple[types.CodeType, int]]:
        """The branches in the graph that decide between ints, where a number is asked for that is not known."""
        asks = self.graph_break is not None and self.graph_break.reason in ASK_NUMBERS
        return self.domain.loops.counts if asks else set()

    def asker(self) -> tuple[str, str] | None:
        """The innermost function running at the break that asked ``is_compiling()`` and was told no.

        None where it has come to what torch.compile compiles (or to that itself): its numbers are those of its backend.
        """
        if self.graph_break is None:
            return None
        stack = [(file, name) for file, _, name in reversed(self.graph_break.stack)]
        if any(torch_private.compiles(file, name) for file, name in stack):
            return None
        waiting = self.domain.asked_compiling - self.domain.compiling_for
        return next((place for place in stack if place in waiting), None)

    def went_on_from(self, before: Trace) -> bool:
        """Whether this attempt left behind the graph break that stopped the one before."""
        new, old = self.domain, before.domain
        # (both sides of a branch that is a node are more instructions than the one that is taken, and get no further)
        further = new.instructions > old.instructions or self.root_step > before.root_step and new.root_pc > old.root_pc
        return self.graph_break is None or (self.graph_break.reason != "exception" and further)

    def enter_frame(self) -> Frame:
        """The root frame with its arguments entered under guards."""
        request, function = self.request, self.request.function
        called = [name if " " in name else f"L[{name!r}]" for name in request.names]
        sources: list[Source] = [Arg(name, i) for i, name in enumerate(called)]
        every = [*request.args, *request.kwargs.values()]
        cells = tuple(every[: request.n_cells])
        for cell, source in zip(cells, sources, strict=False):  # a new cell each call: its contents count
            self.guards.check("type", source, types.CellType, text="is a cell")
            self.objects.records[id(cell)] = Record(cell, source)
        rest = zip(every[request.n_cells :], sources[request.n_cells :], strict=True)
        entered = [self.argument(value, source) for value, source in rest]
        if cells:
            function = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        else:
            self.objects.found(function, function.__qualname__)
        count = len(request.args) - request.n_cells
        if not cells:
            self.domain.guard_function(function)
        frame = self.domain.bind(function, entered[:count], dict(zip(request.kwargs, entered[count:], strict=True)))
        for index in range(frame.program.n_bound):
            value = frame.locals[index]
            if type(value) in (tuple, dict):
                self.objects.made(value)
        return frame

    def argument(self, value: Any, source: Source) -> Any:
        """The trace's value for one of the call's objects."""
        try:
            return self.objects.enter(value, source)
        except UnfollowedTensor as why:
            return self.objects.made(OpaqueTensor(type(value), source, why))

    def symbolic(self, value: Any, source: Source) -> Any:
        """A Python number that differs from call to call, as an input of the graph: an int may be a size."""
        if type(value) is str and self.assumptions.whole_step:
            return self.texts.of_input(value, source)
        small = type(value) is int and value in (0, 1) and self.writer.stop_number is None  # as sizes: constants
        if small:
            self.began_with.counters |= {source.name}  # for the trace that finds a failure: whatever it is by then
        if self.assumptions.whole_step and (
            small or type(value) in (bool, float, complex, *NUMPY_NUMBERS) or source.name in self.assumptions.counters
            or (source.name in self.assumptions.varying and type(value) is int)
            or getattr(source, "operand", None) in COUNTERS
        ):
            return self.numbers.of_input(value, source)
        # (where a graph has failed, the trace goes the way that was captured; sizes have 64 bits)
        if type(value) is not int or small or value.bit_length() > 63:
            if type(value) is not int and self.objects.varies(value, source):
                return self.objects.as_varying(value, source)
            self.guards.equals(source, value)
            return value
        self.guards.check("type", source, int, text="type is int")
        fake = self.world.symbolic_int(value, source.name)
        self.tensors.add_input(value, fake, source)
        return fake


def traced(request: Request, assumptions: Assumptions) -> Trace:
    """One attempt, with those loops over experts unrolled that one node cannot say."""
    attempt = Trace(request, assumptions)
    attempt.run()
    while has_taught(attempt, assumptions):
        attempt.release()
        attempt = Trace(request, assumptions)
        attempt.run()
    return attempt


def has_taught(attempt: Trace, assumptions: Assumptions) -> bool:
    """Whether an attempt found what the next one is to do in another way, which ``assumptions`` learns."""
    gradients, stop, domain, ones = attempt.gradients, attempt.graph_break, attempt.domain, attempt.world.ones
    if gradients.needs_live and not assumptions.holds_live:
        assumptions.holds_live = True
    elif domain.calls.inference.failed and not assumptions.inference_breaks:
        assumptions.inference_breaks = True
    elif stop and assumptions.learn_of_break(stop.reason, domain, attempt.speculation.endless, ones):
        pass
    elif mistaken := attempt.tensors.aliases.mistaken():
        assumptions.together |= mistaken
    elif gradients.needs_history and not assumptions.each_module:
        assumptions.each_module = True
    elif not (gradients.changed <= assumptions.natively and gradients.unseen() <= assumptions.strict):
        assumptions.natively |= gradients.changed
        assumptions.strict |= gradients.unseen()
    elif casts := [c for c in gradients.unmet_casts if c not in assumptions.casts]:
        assumptions.casts += casts
    elif hits := attempt.in_hits - assumptions.not_by_number:
        assumptions.not_by_number |= hits & assumptions.by_number
        assumptions.blockers |= blocked(hits & assumptions.by_number, stop)
        assumptions.by_number |= hits
    elif stop and domain.loops.ranges:
        assumptions.blockers |= blocked(domain.loops.ranges, stop)
        assumptions.unrolled |= domain.loops.ranges  # what stopped it may be what one node could not say
    else:
        return False
    return True


def trace(request: Request, assumptions: Assumptions) -> Trace:
    """Capture as much of the call as one graph can hold."""
    attempt = speculating(traced(request, assumptions), assumptions)
    while (asker := attempt.asker()) is not None:
        other = traced(request, replace(assumptions, compiling_for=attempt.assumptions.compiling_for | {asker}))
        attempt, better = better_of(attempt, other)
        if not better:
            break
    attempt = speculating(attempt, assumptions)
    attempt = reading(counting(attempt))
    if attempt.graph_break is None and attempt.gradients.waiting():
        attempt.gradients.returned(attempt.speculation.leaving())
    if attempt.gradients.waited:  # no attempt got beyond the break
        assumptions.natively |= attempt.gradients.waited
        attempt.release()
        return trace(request, assumptions)
    assumptions.logs |= attempt.objects.appended()
    assumptions.split |= blocked(attempt.in_hits, attempt.graph_break, assumptions.blockers)
    if attempt.graph_break is None or attempt.clean:
        return attempt
    again = Trace(request, attempt.began_with, stop_at=attempt.root_step)
    again.run()
    if again.graph_break is None:
        again.graph_break, again.raises_by = attempt.graph_break, attempt.raises_by
        again.whole_natively = attempt.whole_natively
    attempt.release()
    return again


def better_of(attempt: Trace, other: Trace, better: bool | None = None) -> tuple[Trace, bool]:
    """The one that got further, and whether that is the other one. better: where that is known."""
    better = other.went_on_from(attempt) if better is None else better
    (attempt if better else other).release()
    return (other, True) if better else (attempt, False)


def speculating(attempt: Trace, assumptions: Assumptions) -> Trace:
    """The attempt once more with side exits for the branches on data that ended it; ``assumptions`` learns it.

    A branch whose body a node cannot say (it changes a Python object) is one of these. (With a mesh there are none: it
    is a graph break.)
    """
    before, branches, asks = attempt.assumptions, attempt.in_branches, attempt.asks_data
    exits = assumptions.branches
    for _ in range(MAX_BRANCHES):
        if not branches and (before.speculates or not asks):
            branches = attempt.deciding_branches()  # Python may have to know which number one of them chose
        if not (branches or (exits and asks and not before.speculates)):
            break
        unrolled = before.unrolled | branches
        other = traced(attempt.request, replace(before, speculates=exits, unrolled=unrolled))
        before, branches, asks = other.assumptions, other.in_branches, other.asks_data
        attempt, better = better_of(attempt, other)
        if better:
            assumptions.speculates, assumptions.unrolled = exits, assumptions.unrolled | unrolled
        elif branches <= unrolled:  # (another branch may stand behind the one that it has left behind)
            break
    return attempt


def counting(attempt: Trace) -> Trace:
    """The attempt once more with what the step counts in (``self.steps += 1``) as inputs, so that the next call fits.

    A count that decides a size or an index stays a constant: it may become a symbolic size later.
    """
    assumptions = attempt.assumptions
    names = attempt.objects.counted() - assumptions.counters - assumptions.symbolic_places
    if not names or not assumptions.whole_step or assumptions.dynamic is False:
        return attempt
    other = traced(attempt.request, replace(assumptions, counters=assumptions.counters | names))
    decides = any(number.kind is int for number in other.tensors.numbers.fixed.values())
    attempt, better = better_of(attempt, other, False if decides else None)
    if better:
        assumptions.counters.update(names)
    return attempt


def reading(attempt: Trace) -> Trace:
    """The attempt once more without those texts as inputs that the step looks into, or that break its graph."""
    assumptions = attempt.assumptions
    opened = {t.source.name for t in attempt.tensors.texts.inputs if t.source is not None} - assumptions.varying.keys()
    inspected_strings = attempt.tensors.texts.looked_into()
    if not inspected_strings and (attempt.graph_break is None or not opened):
        return attempt
    known = assumptions.inspected_strings | (inspected_strings or opened)
    other = traced(attempt.request, replace(assumptions, inspected_strings=known))
    attempt, better = better_of(attempt, other, True if inspected_strings else None)
    if better:
        assumptions.inspected_strings.update(inspected_strings or opened)
    return attempt


def traceable(function: Any) -> str | None:
    """Why a function's frames cannot be captured at all, or None."""
    flags = function.__code__.co_flags
    if flags & 0x20:
        return "a generator function"
    if flags & 0x200:
        return "an asynchronous generator function"
    if flags & (0x80 | 0x100):
        return "a coroutine function"
    decode(function.__code__)
    return None
