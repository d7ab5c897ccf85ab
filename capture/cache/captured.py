"""Captured callables: what happens on a cold call, what is kept, when it is captured again, and what it costs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moebius.interpreter import decode
from moebius.interpreter.binding import bind_arguments
from moebius.lowering import WholeStepRefusedError

from ..bytecode.hidden_frames import apart, hidden
from ..bytecode.progress import progress
from ..bytecode.reported import uncounted
from ..bytecode.user_code import is_library
from ..codegen.continuation_code import Beginning
from ..codegen.native_frames import as_python, left_alone, left_first
from ..errors import CaptureInternalError, GraphBreakError, MoebiusError, MoebiusWarning
from ..export.write import export
from ..guards import hints
from ..guards.program import CompiledGuards
from ..guards.recorder import Fact
from ..hook import Entry, call_hooked_for, call_unhooked, detach, leave_to_call, settle
from ..hook.signals import SignalArrived, signals_wait
from ..options import Options
from ..report.failure import capture_failed
from ..report.records import Recompile, Stats
from ..selftest import works
from ..shadow import Shadow
from ..tensors.deferred_state import DeferredState
from ..torch_facts import torch_private
from ..torch_facts.random_state import paused_collector
from ..trace.assumptions import FOREIGN, Assumptions
from ..trace.request import Request
from ..trace.segment import Segment, build
from ..trace.trace import trace
from ..values.values import TRACING, Break
from ..values.weak_ids import WeakIds
from .calls import is_watched, note, note_gone, note_looked_at
from .continuations import (
    MAX_CONTINUATIONS,
    SAME_CONTINUATIONS,
    again,
    cell_places,
    continuations_of,
    earlier_continuation,
    later,
    left_behind,
)
from .deterministic import deterministic
from .environment_changes import MAX_CHANGES, changed, is_a_race, replaced, tell_of_a_race, tell_of_a_replacement
from .expert_placement import MeshCalls, Placement, average_what_it_met, average_what_it_reaches, in_a_call, surround
from .generalize_guards import open_numbers, open_place
from .logs import log_capture, log_recompile, warn
from .misses import RARE, leave_backward_outside, listen
from .patience import Patience, on_trial
from .recompiles import failures, hint_of, latest_reason, other_break, told
from .reference_cycles import ReferenceCycles
from .short_lived import ShortLived, called_on
from .stale_captures import StaleCapture
from .varying import Varying, tell

MAX_SEGMENTS = 16  # of the same modules; past it the callable runs natively, and the report names what kept changing
MAX_MODULES = 512  # as many segments as modules that share a forward method: the layers of a model
MAX_LOOKS = 3  # how often what broke is traced once more, in the second call, to see whether it still does
DEBUG = bool(os.environ.get("MOEBIUS_DEBUG"))

ALL: weakref.WeakSet[Captured] = weakref.WeakSet()
SERIALS = itertools.count(1)  # a captured function's, and of all that is captured below it: they have its options
BEFORE_IT_GOES: list[Callable[[Captured], None]] = []  # asked before a capture goes with its model (the command line)
MARKED = WeakIds()  # tensor -> dimensions that were marked dynamic


class Captured:
    """One callable under capture: a function of the user's, or the rest of one after a graph break.

    entry: the C callable that dispatches on guards. children: what goes on after its breaks and functions that were
    met below native calls. segments: what was captured, newest last. continuations: of frames, by their code, oldest
    first.
    """

    def __init__(
        self,
        function: types.FunctionType,
        options: Options,
        names: tuple[str, ...] = (),
        parent: Captured | None = None,
        beginning: Beginning | None = None,
    ):
        self.function, self.options, self.beginning = function, options, beginning
        self.n_cells, self.names = (0, names) if beginning is None else (len(beginning.state.cells), beginning.names)
        self.cells = cell_places(function, parent, beginning)
        self.assumptions = Assumptions(
            dynamic=options.dynamic, whole_step=options.in_one_graph, outside=FOREIGN, options=options
        )
        self.assumptions.marked = lambda t: frozenset(MARKED.get(t, ()))
        self.segments: list[Segment] = []
        self.left: list[Segment] = []  # for reports: one that a branch on data left, until there is another
        self.children: list[Captured] = []
        self.recompiles: list[Recompile] = []
        self.misses: dict[str, int] = {}  # of each branch on data, how often it left its graph
        self.cold_seconds, self.given_up = 0.0, ""  # given_up: why it is captured no more
        self.root = parent is None
        self.serial: int = next(SERIALS) if parent is None else parent.serial
        self.met: Counter[types.CodeType] = Counter() if parent is None else parent.met
        self.parent: Callable[[], Captured | None] = (lambda: None) if parent is None else weakref.ref(parent)
        self.met_as: types.CodeType | None = None  # of a function that was met below a native call: its code
        self.looks, self.short_lived, self.patience = 0, ShortLived(), Patience()
        self.races = 0  # captures that another thread has spoiled
        self.stale_captures, self.varying = StaleCapture(), Varying()
        self.mesh_calls: MeshCalls = MeshCalls.begin(function, options) if parent is None else parent.mesh_calls
        self.entry = Entry(function, self.cold, around=surround(function, self.mesh_calls, options)) \
            if beginning is None else Entry(self.run_plain, self.cold, True)
        self.deferred_state = DeferredState([])
        self.shadow = Shadow(options.verify) if options.verify and parent is None else None
        self.taught: dict[types.CodeType, Assumptions] = {} if parent is None else parent.taught
        self.top: Callable[[], Captured | None] = weakref.ref(self) if parent is None else parent.top
        self.met_below: list[Captured] = []  # of a root alone
        self.left_at = 0  # calls by the time at which what led to it went
        self.continuations: dict[types.CodeType, list[weakref.ref[Captured]]]
        self.continuations = {} if parent is None else parent.continuations
        if parent is not None:
            self.assumptions.continues, self.assumptions.natively = beginning is not None, parent.assumptions.natively
            self.assumptions.learn_with(self.taught.setdefault(function.__code__, self.assumptions))
            self.assumptions.learn_from(parent.assumptions, function.__code__)
            parent.children.append(self)
        ALL.add(self)

    @hidden
    def cold(self, entry: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """No guards held: capture this call and keep what came of it, which runs once this frame is left."""
        with signals_wait(), uncounted():
            try:
                run = apart(self.mesh_calls.told(self.prepare), entry, args, kwargs)
            finally:
                settle()
        return leave_to_call(run, args, kwargs)

    @hidden
    def prepare(self, entry: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """What a cold call runs: what was captured for it, or the function as it is."""
        native = self.settled(self.function, begins=self.root) if self.beginning is None else self.plain
        if self.root and self.options.mesh is not None:
            average_what_it_reaches(self.function, self.options, args, kwargs)
        if why := self.why_not(args, kwargs):
            note(self, None, why, again=False)
            return native
        if self.deferred_state.put_back():
            for segment in self.segments:
                if segment.guards.hold(args, kwargs):
                    note(self, segment, "", again=False)
                    return self.deferred_state.around(self.runner(segment))
        before = bool(self.segments or self.recompiles)
        worth_it, why = False, ""
        try:
            if (run := earlier_continuation(self, args, kwargs)) is not None:
                return run
            worth_it = not entry.targets or self.learn(args, kwargs)
            if worth_it:
                with paused_collector(), progress(self.function.__qualname__):
                    segment = call_unhooked(self.capture, args, kwargs)  # what capture itself runs is not captured
        except CaptureInternalError as error:
            self.report_failure(error)
            worth_it = False
        except (MoebiusError, MoebiusWarning):
            self.deferred_state.take_away()
            raise
        except SignalArrived:
            worth_it, why = False, "a signal came while it was captured"
        except (Exception, Break) as error:
            if is_a_race(error):
                self.races += 1
                self.given_up = "other threads change what it reads" if self.races == MAX_CHANGES else ""
                tell_of_a_race(self.function.__qualname__, error, bool(self.given_up))
            else:
                self.report_failure(error)
            worth_it = False
        if not worth_it:  # (outside of the handlers: capture's error is not the context of the program's)
            self.deferred_state.take_away()
            note(self, None, self.given_up or why, again=before)
            return native
        note(self, segment, "", again=before)
        if segment.graph_break is not None and self.options.fullgraph:
            self.deferred_state.take_away()
            self.deferred_state.park()
            raise GraphBreakError(segment.graph_break)
        return self.deferred_state.around(self.runner(segment)) if self.deferred_state.away else self.runner(segment)

    def why_not(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why a call runs natively, before anything of it is captured; "" if it does not."""
        if getattr(TRACING, "where", None) is not None:
            return "it is called while another call is captured"
        if self.given_up:
            return self.given_up
        if self.root and not works(captured_once):
            return "moebius does not work with this torch (it said so when it tried itself)"
        given = self.short_lived.is_given(args, kwargs, (ref() for segment in self.segments for ref in segment.modules))
        if self.short_lived.are_many():
            self.give_up(self.short_lived.in_words(), hints.MADE_ANEW)
        if given or self.given_up:
            return self.given_up or "a model or optimizer was made for this call, as in those before"
        if not self.binds(args, kwargs):
            return "its arguments do not fit"  # it raises the TypeError that says so
        if torch.jit.is_tracing():  # sizes are tensors then, and whoever asks is told that it traces
            return "torch.jit traces it"
        if torch_private.saving_is_seen(by_checkpoints_alone=self.root):
            return "it runs inside of a checkpoint that runs natively, or under hooks on saved tensors"
        if (name := replaced()) is not None:
            tell_of_a_replacement(self.function.__qualname__, name)
            return f"{name} was replaced"
        return ""

    def request(self, args: tuple, kwargs: dict[str, Any]) -> Request:
        return Request(self.function, args, kwargs, self.n_cells, self.argument_names(args, kwargs))

    def binds(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether these arguments fit the function's parameters."""
        try:
            if not self.n_cells:
                bind_arguments(decode(self.function.__code__), self.function, [*args], kwargs)
        except TypeError:
            return False
        return True

    def runner(self, segment: Segment) -> Callable[..., Any]:
        """What runs when the segment's guards hold; in shadow mode it is compared with plain Python now and then."""
        run = self.settled(segment.run, begins=self.root)
        return run if self.shadow is None else self.shadow.around(self, run)

    def settled(self, run: Callable[..., Any], begins: bool = False) -> Callable[..., Any]:
        """With what the options switch on for the time of a call. begins: this is where the call begins."""
        if self.options.mesh is not None:
            run = in_a_call(run, self.mesh_calls, self.options, begins, self.recompiles, self.segments)
        return deterministic(run) if self.options.deterministic else run

    def capture(self, args: tuple, kwargs: dict[str, Any]) -> Segment:
        started = time.perf_counter()
        self.assumptions.symbolic_places |= self.short_lived.places()
        request = self.request(args, kwargs)
        children, made = len(self.children), len(self.deferred_state.made)
        segment = self.attempt(request, started)
        if placing := Placement.wanted(segment, self.options):
            del segment  # no reference to a parameter may remain while its storage moves
            self.children.clear()
            self.below_native.clear()
            self.deferred_state.taken_out(self.deferred_state.made)
            placing.place(self.options)
            segment = self.attempt(request, started)
        if stale := self.stale(segment, args, kwargs):
            # What capture asks natively (a cached function's answer) may fill what the trace has read, once.
            del self.children[children:]
            self.deferred_state.taken_out(self.deferred_state.made[made:])
            del self.deferred_state.made[made:]
            segment = self.attempt(request, started)
            if self.stale(segment, args, kwargs):
                raise changed(*stale)
        segment.seconds = time.perf_counter() - started
        self.cold_seconds += segment.seconds
        if segment.graph_break is None or not self.options.fullgraph:
            if is_watched() or BEFORE_IT_GOES:
                segment.guards.measure(args, kwargs)
            listen(self, segment)
            segment.hits_before, segment.captured_in = self.entry.hits, self.call_number
            on = called_on(args)
            segment.modules = tuple(root for root in segment.guards.roots if any(root() is module for module in on))
            self.segments.append(segment)
            log_capture(self.function, segment)
            self.left.clear()
            again = segment.graph_break is not None and self.shadow is None
            run = functools.partial(self.look_again, segment) if again else on_trial(self, segment)
            self.entry.add(segment.guards.program, run)
            for root in segment.guards.roots:
                self.forget_with(root, segment)
        return segment

    @hidden
    def look_again(self, segment: Segment, *args: Any, **kwargs: Any) -> Any:
        """The second call of what had a graph break."""
        with signals_wait(), uncounted():
            still = apart(self.breaks_still, segment, args, kwargs)
        if still:
            note_looked_at(self.entry, segment.guards.program, runs=True)
            return leave_to_call(self.runner(segment), args, kwargs)
        return self.cold(self.entry, args, kwargs)

    def enter_again(self, segment: Segment, run: Callable[..., Any], runs: bool) -> None:
        """Let another callable run for it. runs: whether it does so for the call that this is found in."""
        self.entry.remove(segment.guards.program)
        self.entry.add(segment.guards.program, run)
        note_looked_at(self.entry, segment.guards.program, runs)

    def breaks_still(self, segment: Segment, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Much breaks a graph only once (hooks that are installed in the first call, a cache that is filled, a warning
        that is given once); what was captured up to there does not depend on it, so its guards go on to hold. Where
        the break is gone (False), the call is to be captured anew."""
        before = segment.graph_break
        assert before is not None
        if segment in self.segments:
            self.enter_again(segment, on_trial(self, segment), runs=False)  # (where it is to go, its hit is no run)
        if getattr(TRACING, "where", None) is not None or self.looks == MAX_LOOKS or segment not in self.segments:
            return True
        self.looks += 1
        started = time.perf_counter()
        request = self.request(args, kwargs)
        try:
            with paused_collector():
                found = call_unhooked(trace, request, self.assumptions)
        except (Exception, SignalArrived):  # the first capture stands
            return True
        finally:
            self.cold_seconds += time.perf_counter() - started
        further = segment.whole and found.domain.instructions > segment.instructions
        # what cannot be rebuilt is what it was, where the step has gone the same way
        same_result = not segment.whole and found.domain.instructions == segment.instructions
        found.release()
        if (found.graph_break is not None and not further) or same_result:
            return True
        self.forget(segment)
        if not self.segments:
            self.leave_children()
        was = other_break(before, found.graph_break)
        hint = "nothing to do: the first call alone did it" if found.graph_break is None else ""
        self.tell_recompile("graph break", *was, before.file, before.line, hint)
        return False

    def stale(self, segment: Segment, args: tuple, kwargs: dict[str, Any]) -> tuple[Fact, str] | None:
        """The guard, if any, that does not hold for the call that it was made from, and what was found instead."""
        if segment.graph_break is not None and self.options.fullgraph:
            return None  # (an error is all that comes of it)
        failed, found = segment.guards.failure(args, kwargs)
        return None if failed is None else (failed, found)

    def attempt(self, request: Request, started: float) -> Segment:
        try:
            return self.attempt_once(request, started)
        except WholeStepRefusedError as refused:
            leave_backward_outside(self.assumptions, str(refused))
            self.children.clear()
        return self.attempt_once(request, started)

    def attempt_once(self, request: Request, started: float) -> Segment:
        found = trace(request, self.assumptions)
        if not self.root:
            text = "not in a checkpoint that runs natively"
            found.guards.answers("torch.utils.checkpoint", text, (torch_private.saving_is_seen, False))
        try:
            average_what_it_met(found, self.function, self.options, self.root)
            return build(found, self.options, self, self.deferred_state, started)
        finally:
            found.release()

    @property
    def below_native(self) -> list[Captured]:
        """Met below native calls by the family. The root alone holds them: code leads on, and is not collected."""
        return [] if (top := self.top()) is None else top.met_below

    def leave_children(self) -> None:
        """What was captured for them goes with what leads to them. A function that was met below a native call stays,
        hooked: it counts again when it is called again."""
        left_behind(self)
        self.children.clear()
        for one in self.below_native:
            one.left_at = one.calls

    def forget_with(self, root: weakref.ref, segment: Segment) -> None:
        """When a model that a segment was captured for dies, the segment goes too."""
        obj = root()
        if obj is None:
            return
        me, captured_for_it = weakref.ref(self), weakref.ref(segment)  # (others of its models may live on)
        ends = sys.is_finalizing

        def gone(_: Any) -> None:
            if ends():  # (the names of modules are gone)
                return
            owner, segment = me(), captured_for_it()
            if owner is not None and segment is not None and segment in owner.segments:
                lasted = owner.root or owner.call_number - segment.captured_in > 1  # (parts are met often)
                used = owner.entry.hits != segment.hits_before and lasted
                owner.short_lived.died(used, (owner.entry.misses, owner.entry.hits), segment.guards.models)
                tell_before_it_goes(owner)
                owner.forget(segment)

        segment.watched.append(weakref.ref(obj, gone))
        LEADING_BACK.watch(root, functools.partial(gone, None))

    def forget(self, segment: Segment) -> None:
        """Its guards are asked no more. It may be gone by then: with its model, or in another thread."""
        note_gone(self, segment)
        with contextlib.suppress(ValueError):
            self.segments.remove(segment)
        self.entry.remove(segment.guards.program)

    def argument_names(self, args: tuple, kwargs: dict[str, Any]) -> tuple[str, ...]:
        if self.names:
            cells = (self.cells[name] for name in self.names[: self.n_cells])
            return (*cells, *self.names[self.n_cells :], *kwargs)
        code = self.function.__code__
        fixed = code.co_varnames[: code.co_argcount]
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & 0x04 else "args"
        return (*fixed[: len(args)], *(f"{rest}[{i}]" for i in range(len(args) - len(fixed))), *kwargs)

    @functools.cached_property
    def plain(self) -> Callable[..., Any]:
        """What runs a continuation as Python."""
        return left_first(self.settled(as_python(self.function, self.beginning)[0]))

    @hidden
    def run_plain(self, *args: Any) -> Any:
        return self.plain(*args)

    def make_resume(self, beginning: Beginning, varying: set[str]) -> Any:
        """The captured continuation of a frame: called, it is put off until the frame is left that calls it.

        Each iteration of a loop with a graph break in it goes on in a continuation of its own, in which the places of
        that iteration are known, until the guards of an earlier iteration hold for one: that goes on in the earlier
        one's. After many turns the same continuation goes on to serve. varying: places with numbers that the graph has
        computed.
        """
        code = beginning.resume_code()
        same, depth = continuations_of(self, code)
        if len(same) >= SAME_CONTINUATIONS:
            return again(weakref.ref(same[0].entry), same[0].plain)
        cells = tuple(types.CellType() for _ in beginning.state.cells)
        function = left_alone(types.FunctionType(code, self.function.__globals__, None, None, cells))
        if depth >= MAX_CONTINUATIONS:
            return left_first(self.settled(as_python(function, beginning)[0]))
        continuation = Captured(function, self.options, parent=self, beginning=beginning)
        continuation.assumptions.go_on(varying, beginning.on_data)
        known = self.continuations.setdefault(code, [])
        known[:] = [ref for ref in known if ref() is not None] + [weakref.ref(continuation)]
        return later(continuation.entry)

    def below(self, callee: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, run with the frame hook on: user functions below it are captured as children of this one."""
        run: Any = functools.partial(call_hooked_for, self.serial, self, callee)
        if isinstance(callee, types.FunctionType | types.MethodType):  # errors of the call name what the user called
            functools.update_wrapper(run, callee, ("__module__", "__name__", "__qualname__"), ())
        return run

    # ------------------------------------------------------------------------------------------------------------------
    # Capturing again
    # ------------------------------------------------------------------------------------------------------------------

    def tell_recompile(self, guard: str, old: str, new: str, file: str, line: int, hint: str = "") -> None:
        """For reports: why the next capture is made."""
        self.recompiles.append(Recompile(guard, old, new, file, line, hint, call=self.call_number))

    def learn(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Why the newest segments do not fit this call, and what to leave open next time. False: capture no more."""
        modules = {id(module) for module in called_on(args)}
        alike = [segment for segment in self.segments if modules.issuperset(id(module()) for module in segment.modules)]
        if not self.root:
            hits = {program: count for program, _, count in self.entry.targets}
            others = [(each, hits.get(each.guards.program, 0)) for each in self.segments if each not in alike]
            for segment in self.short_lived.idle(others, self.call_number):
                self.forget(segment)
        failed, told_before = failures(alike, args, kwargs), len(self.recompiles)
        known = self.assumptions.amount(), len(self.segments)
        if failed:
            said = told(failed, self.function.__code__, args, kwargs)
            self.recompiles.append(why := Recompile(*said, self.call_number))
            log_recompile(self.function.__qualname__, why.change, why.file, why.line, why.hint)
        for segment in reversed(alike):
            fact = failed[id(segment)].fact if id(segment) in failed else None
            if fact is None:
                continue
            opened = open_place(self.assumptions, fact, segment.guards, args, kwargs)
            served = self.entry.hits - segment.hits_before >= RARE
            goes = (self.stale_captures.goes(fact, args, kwargs) or opened) and self.stale_captures.may_go(served)
            if segment is alike[-1] and not (goes and served):
                hint, facts = hint_of(fact, self.function.__code__, args, kwargs), segment.guards.facts
                tell(self, self.varying.learn(self.assumptions, fact, hint, served, args, kwargs, facts))
            if goes:
                self.forget(segment)
            open_numbers(self.assumptions, segment.guards, args, kwargs)
        if len(alike) >= MAX_SEGMENTS or len(self.segments) >= MAX_MODULES:
            hint, latest = latest_reason(self.recompiles)
            if found := self.varying.leave_open(self.assumptions, hint):
                tell(self, found)
                for segment in alike:
                    self.forget(segment)
                return True
            self.give_up(f"captured {len(self.segments)} times", latest)
            return False
        learnt = known != (self.assumptions.amount(), len(self.segments))
        if self.root or self.patience.lasts(alike, self.entry, learnt, self.call_number):
            return True
        if self.patience.looks > MAX_SEGMENTS:
            self.give_up(f"captured {len(alike)} times, which served little,", latest_reason(self.recompiles)[1])
        del self.recompiles[told_before:]  # (nothing is captured)
        return False

    def give_up(self, what: str, hint: str) -> None:
        """Capture no more, and say so."""
        self.given_up = f"it was {what}; {hint}"
        warn(f"moebius: {self.function.__qualname__} was {what} and runs natively now; {hint}")

    def report_failure(self, error: Exception | Break) -> None:
        """An internal error: say so once, with the place, and let the native call go on."""
        self.given_up = f"moebius failed while capturing it: {type(error).__name__}: {error}"
        self.segments.clear()  # half of what was captured is worth nothing, and holds on to the user's objects
        self.entry.clear()
        warn(capture_failed(self.function, error, is_library))
        if DEBUG:
            traceback.print_exception(error, file=sys.stderr)

    def export(self, path: str | os.PathLike) -> None:
        """Write the capture of the latest call to a file for ``moebius.load``. Raises ExportError, which says why."""
        export(self, path)

    # ------------------------------------------------------------------------------------------------------------------
    # What the report reads
    # ------------------------------------------------------------------------------------------------------------------

    def family(self) -> Iterator[Captured]:
        """This one and everything that was captured below it."""
        found: dict[Captured, None] = {}
        pending = [*(one for one in reversed(self.below_native) if self.root and one.calls > one.left_at), self]
        while pending:
            one = pending.pop()
            if one not in found:
                found[one] = None
                pending += reversed(one.children)
        yield from found

    @property
    def calls(self) -> int:
        """How often it was called."""
        return self.entry.hits + self.entry.misses

    @property
    def call_number(self) -> int:
        """Which of the calls of what it belongs to this is, from 1."""
        parent = self.parent()
        return self.calls if parent is None else parent.call_number

    def stats(self) -> Stats:
        """Counts over the whole family. hits: calls that ran without capture; misses: calls that captured."""
        stats = Stats()
        for member in self.family():
            stats.entries += len(member.segments)
            stats.hits += member.entry.hits
            stats.misses += member.entry.misses
            stats.graphs += sum(s.graph is not None for s in member.segments)
            stats.breaks += sum(s.graph_break is not None for s in member.segments)
            stats.recompiles += member.recompiles
            stats.cold_seconds += member.cold_seconds
        stats.recompiles.sort(key=lambda recompile: recompile.call)
        if self.shadow is not None:
            stats.verified, stats.differences = self.shadow.verified, list(self.shadow.differences)
        return stats

    def reset(self) -> None:
        """Forget everything that was captured."""
        self.entry.clear()
        self.below_native.clear()
        for known in (self.segments, self.left, self.children, self.recompiles, self.taught, self.continuations):
            known.clear()
        self.deferred_state = DeferredState([])
        self.assumptions.forget()
        self.misses.clear()
        if self.met_as is not None and self.given_up:
            detach(self.met_as)
        self.given_up, self.short_lived, self.races, self.patience = "", ShortLived(), 0, Patience()
        self.stale_captures, self.varying, self.cold_seconds = StaleCapture(), Varying(), 0.0


def tell_before_it_goes(captured: Captured, everybody: list[Callable[[Captured], None]] = BEFORE_IT_GOES) -> None:
    """A capture goes with the model that it is for: whoever writes a report at the process's end looks at it now."""
    for ask in everybody:
        one = captured
        while (parent := one.parent()) is not None:
            one = parent
        ask(one)


def captures() -> list[tuple[CompiledGuards, Callable[..., Any]]]:
    """All that there are."""
    return [(segment.guards, segment.run) for captured in [*ALL] for segment in [*captured.segments, *captured.left]]


LEADING_BACK = ReferenceCycles(captures)


def captured_once(function: types.FunctionType, args: tuple) -> Segment:
    """A capture that nobody keeps. Raises whatever capture raises."""
    return call_unhooked(Captured(function, Options()).capture, args, {})
