"""What users call: ``capture``, ``explain``, ``stats``, ``reset``, ``disable``, ``mark_dynamic``."""

from __future__ import annotations

import copyreg
import functools
import os
import statistics
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

import torch

from moebius.lowering import Blockers
from moebius.lowering.sync_points import sync_points

from .bytecode.user_code import SHOWS, is_library, shown_code
from .cache.below_native import install_frame_callback
from .cache.calls import CallRecord, recorded
from .cache.captured import ALL, BEFORE_IT_GOES, MARKED, Captured, tell_before_it_goes
from .cache.generators import RUNS_AS_PYTHON, driven, is_driven
from .cache.recompiles import shown
from .codegen.native_parts import NativePart
from .errors import NotCapturableError, OptionError
from .hook import Entry, call_unhooked, is_disabled, leave_alone
from .options import CaptureOptions, Options, make_options
from .report import Report
from .report.records import GraphBreak, Stats
from .report.words import place
from .torch_facts import torch_fakes, torch_memory
from .trace.segment import Segment
from .trace.trace import traceable
from .versions import check_versions

check_versions(sys.version_info[:3], torch.__version__, is_disabled())
install_frame_callback()
torch_memory.calibrate_tensor_guards()
ROOTS: weakref.WeakSet[Captured] = weakref.WeakSet()  # what users captured, in no order
SNAPSHOTS: weakref.WeakKeyDictionary[Captured, Report] = weakref.WeakKeyDictionary()
KEPT: list[Captured] | None = None  # for the command line: what a script captured in functions that have returned


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=torch.nn.Module)


class CapturedFunction(Protocol[P, R]):
    """What ``capture`` makes of a function, for type checkers: its signature, and what is reachable on it."""

    __wrapped__: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __get__(self, instance: None, owner: type) -> CapturedFunction[P, R]: ...
    @overload
    def __get__(
        self: CapturedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> CapturedFunction[Q, R]: ...
    def export(self, path: str | os.PathLike[str]) -> None: ...


@overload  # a module is callable, too
def capture(target: M, **options: Unpack[CaptureOptions]) -> M: ...  # type: ignore[overload-overlap]
@overload
def capture(target: Callable[P, R], **options: Unpack[CaptureOptions]) -> CapturedFunction[P, R]: ...
@overload
def capture(
    target: None = None, **options: Unpack[CaptureOptions]
) -> Callable[[Callable[P, R]], CapturedFunction[P, R]]: ...
def capture(target: Any = None, **options: Any) -> Any:
    """Capture a function, a bound method or an ``nn.Module``: a callable with the same signature and result.

    Used as ``@capture``, ``@capture(fullgraph=True)`` or ``capture(model)``. Options: see ``moebius.options.Options``.
    Attributes of what was captured stay reachable (``__wrapped__``; a module's attributes and ``state_dict``).
    Raises NotCapturableError for what cannot be called, OptionError for an option or value that does not exist.
    """
    checked = make_options(options)
    if target is None:
        return functools.partial(capture_with, checked)
    return capture_with(checked, target)


def capture_with(options: Options, target: Any) -> Any:
    """``capture`` with options that are checked already."""
    if isinstance(target, torch.nn.Module) and type(target) is not CapturedModule:
        return CapturedModule(target, options)
    if captured_of(target) is not None:
        raise NotCapturableError(
            f"{target!r} is captured already; capture the function that it wraps (__wrapped__) with other options"
        )
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        return types.MethodType(capture_function(target.__func__, options), target.__self__)
    if isinstance(target, types.FunctionType):
        return capture_function(target, options)
    if isinstance(target, (classmethod, staticmethod)):  # (the decorators stand in the other order)
        return type(target)(capture_with(options, target.__func__))
    if type(target) is functools.partial:
        return functools.partial(capture_with(options, target.func), *target.args, **target.keywords)
    if isinstance(target, type):
        raise NotCapturableError(
            f"capture got the class {target.__name__}; capture an instance of it, or one of its methods"
        )
    if callable(target):
        call = type(target).__call__
        if isinstance(call, types.FunctionType):
            return types.MethodType(capture_function(call, options), target)
        if captured_of(call) is not None:
            raise NotCapturableError(
                f"{type(target).__name__}.__call__ is captured already, for all its objects; call the object itself"
            )
        raise NotCapturableError(
            f"capture got a {type(target).__name__} that is written in C, or is called by what is no Python function; "
            "capture the Python function that calls it"
        )
    raise NotCapturableError(
        f"capture needs a function, a bound method or an nn.Module, not {type(target).__name__} {target!r:.60}"
    )


def capture_function(function: Any, options: Options) -> Any:
    if is_driven(function):
        captured = Captured(function, options)
        run = driven(function, captured.below)
        run.__dict__["moebius_captured"] = captured
        remember(captured)
        return run
    why = traceable(function)
    if why is not None:
        raise NotCapturableError(
            f"{function.__qualname__} is {why}; capture the function that it calls for each step"
        )
    captured = Captured(function, options)
    functools.update_wrapper(captured.entry, function)
    vars(captured.entry)["export"] = captured.export
    remember(captured)
    return captured.entry


def reduced(entry: Entry) -> Any:
    """For pickle: by its name, as a function is, where that leads to it; else the function and the options."""
    captured = captured_of(entry)
    found: Any = sys.modules.get(getattr(entry, "__module__", ""))
    for name in entry.__qualname__.split("."):
        found = getattr(found, name, None)
    if captured is None or found is entry:
        return entry.__qualname__
    return capture_with, (captured.options, captured.function)


copyreg.pickle(Entry, reduced)


def remember(captured: Captured) -> None:
    ROOTS.add(captured)
    if KEPT is not None:
        KEPT.append(captured)


def keep_captured() -> None:
    """From now on what is captured stays alive with the process, for a report at its end."""
    global KEPT
    KEPT = KEPT or []
    watch_captures()


def watch_captures() -> None:
    """From now on what is captured has its guards timed, and its report outlives it."""
    if take_snapshot not in BEFORE_IT_GOES:
        BEFORE_IT_GOES.append(take_snapshot)


def take_snapshot(captured: Captured) -> None:
    """The report of what is there, before a part of it goes; the fullest one is kept."""
    report, before = report_of(captured), SNAPSHOTS.get(captured)
    if before is None or len(report.graphs) + len(report.breaks) >= len(before.graphs) + len(before.breaks):
        SNAPSHOTS[captured] = report


class CapturedModule:
    """A captured ``nn.Module``: calls are captured, everything else is the module's, its class for ``isinstance`` too.

    Methods that return the module (``to``, ``train``, ``eval``, ``requires_grad_``, …) return the captured one. A copy,
    and what was pickled, is captured with the same options.
    """

    def __init__(self, module: torch.nn.Module, options: Options):
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        call.__qualname__ = type(module).__qualname__  # in reports, as is its place
        vars(call)[SHOWS] = getattr(getattr(type(module), "forward", call), "__code__", call.__code__)
        self.__dict__["__wrapped__"] = module
        self.__dict__["__doc__"] = module.__doc__  # (else it were this class's)
        self.__dict__["moebius_options"] = options
        self.__dict__["moebius_entry"] = capture_function(call, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["moebius_entry"](self.__dict__["__wrapped__"], *args, **kwargs)

    def export(self, path: str | os.PathLike) -> None:
        """Write the captured forward pass to one file for ``moebius.load``. Raises ExportError."""
        self.__dict__["moebius_entry"].export(path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The module's class: libraries ask for it (``isinstance(model, nn.Module)``, its signature)."""
        return type(self.__dict__["__wrapped__"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return capture_with, (self.__dict__["moebius_options"], self.__dict__["__wrapped__"])

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["__wrapped__"]
        value = getattr(module, name)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return self.chained(value)
        return value

    def chained(self, method: types.MethodType) -> Any:
        """The module's method; where it returns the module, the captured one."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is method.__self__ else result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["__wrapped__"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["__wrapped__"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["__wrapped__"])

    def __repr__(self) -> str:
        return f"captured {self.__dict__['__wrapped__']!r}"


def captured_of(target: Any) -> Captured | None:
    """The capture behind a callable that ``capture`` returned."""
    if type(target) is functools.partial:
        target = target.func
    if type(target) is CapturedModule:
        target = target.__dict__["moebius_entry"]
    if isinstance(target, types.MethodType):
        target = target.__func__
    if isinstance(target, types.FunctionType):
        return target.__dict__.get("moebius_captured")
    if not isinstance(target, Entry):
        return None
    owner = getattr(target.cold, "__self__", None)
    return owner if isinstance(owner, Captured) and owner in ROOTS else None


def bound_arguments(target: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """What the captured function gets where its callable gets these."""
    if type(target) is functools.partial:
        given, gap = iter(args), getattr(functools, "Placeholder", captured_of)  # (since 3.14)
        filled = [next(given) if arg is gap else arg for arg in target.args]
        return bound_arguments(target.func, (*filled, *given), {**target.keywords, **kwargs})
    if type(target) is CapturedModule:
        return (target.__dict__["__wrapped__"], *args), kwargs
    return ((target.__self__, *args) if isinstance(target, types.MethodType) else args), kwargs


class Explained:
    """What ``explain(fn)`` gives. Called, it runs ``fn`` once and reports how the call was captured. report: of the
    newest call, one that raised included."""

    report: Report | None = None

    def __init__(self, target: Callable[..., Any], captured: Captured):
        self.target, self.captured = target, captured

    def __repr__(self) -> str:
        function = self.captured.function
        return f"<explain of {function.__qualname__}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Report:
        began = time.perf_counter()
        given = bound_arguments(self.target, args, kwargs)
        try:
            with recorded(self.captured, ALL) as record:
                result = self.target(*args, **kwargs)
        except Exception as error:
            took = time.perf_counter() - began
            self.report = report_of_call(self.captured, record, None, *given, took, raised_by(error))
            raise
        took = time.perf_counter() - began
        self.report = report_of_call(self.captured, record, result, *given, took)
        return self.report


def raised_by(error: Exception) -> str:
    """An error's type, and the user's line in which it was raised."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [(code, line) for code, line in frames if not is_library(code.co_filename)]
    where = f" at {place(mine[-1][0].co_filename, mine[-1][1])}" if mine else ""
    return f"{type(error).__name__}{where}"


def explain(target: Any, **options: Any) -> Explained:
    """``explain(fn)(*args, **kwargs)``: run the call once and report how it was captured; graph breaks do not raise.
    What the call itself raises does; ``explain(fn).report`` has what was captured until then."""
    captured = captured_of(target)
    if captured is None:
        options.pop("fullgraph", None)
        target = capture(target, **options)
        captured = captured_of(target)
    elif options:
        raise OptionError("explain of a captured function takes no options: it has its own")
    assert captured is not None
    return Explained(target, captured)


def new_report(captured: Captured, result: Any = None) -> Report:
    code = shown_code(captured.function)
    report = Report(result=result, name=captured.function.__qualname__, file=code.co_filename, line=code.co_firstlineno)
    report.step_seconds = statistics.median(captured.entry.times) if captured.entry.times else None
    if is_driven(captured.function):
        report.status, report.why = "native", RUNS_AS_PYTHON
    return report


def report_of_call(
    captured: Captured,
    record: CallRecord,
    result: Any,
    args: tuple,
    kwargs: dict[str, Any],
    seconds: float,
    raised: str = "",
) -> Report:
    """The report of one call, which took so long: what ran in it, not what was captured before or since."""
    report = new_report(captured, result)
    report.raised = raised
    if not report.why:
        report.status, report.why = record.status, record.why_native
    for one in record.runs:
        member, segment = one.captured, one.segment
        if member is captured and segment.guards.hold(args, kwargs):
            segment.guards.measure(args, kwargs)
        add_segment(report, segment, member)
        for counts in (one.whole, *one.left):
            report.count("captured", counts)
        took = record.native.seconds.get(id(segment.native))
        if segment.graph_break is not None:
            report.breaks.append(with_cost(segment.graph_break, took))
    report.counting_stopped = record.native.stopped
    report.count("opaque", record.native.opaque)
    report.count("native", record.native.native)
    report.recompiles = captured.stats().recompiles
    capturing = sum(cold.segment.seconds for cold in record.cold if cold.segment is not None)
    report.seconds = {"capturing": capturing, "running": seconds - capturing}
    return report


def with_cost(item: GraphBreak, seconds: float | None) -> GraphBreak:
    return replace(item, cost_us=None if seconds is None else seconds * 1e6)


def add_segment(report: Report, segment: Segment, of: Captured) -> None:
    if (graph := segment.graph) is not None:
        report.graphs.append(graph)
    report.expert_regions += segment.regions
    if segment.captured is not None and segment.regions:
        blockers = Blockers(segment.captured, of.options.for_lowering())
        report.searches.append((segment.regions, blockers.of))
    report.sync_points += sync_points(segment.lowered.gm) if segment.lowered is not None else []
    report.guards += shown(segment.guards, of.function.__code__)


def report_of(captured: Captured) -> Report:
    """The report of everything that was captured for a callable so far. An instruction counts once, in the newest
    capture of each part of it; what ran natively was not looked at."""
    report = new_report(captured)
    if captured.given_up:
        report.status, report.why = "native", captured.given_up
    family = {id(one): one for one in captured.family()}
    run = {id(one): one for one in run_by_a_call([captured, *captured.below_native], family)}
    graphs = sum(segment.graph is not None for segment in run.values())
    report.calls = captured.entry.hits, captured.entry.hits + captured.entry.misses, graphs
    costs = {cause(one.graph_break) for one in run.values() if one.graph_break is not None and one.native is not None}
    report.newest = []
    for member in captured.family():
        segments = member.segments or member.left
        for segment in segments:
            guards, regions = len(report.guards), len(report.expert_regions)
            add_segment(report, segment, member)
            if id(segment) in run:
                report.newest += report.guards[guards:] + report.expert_regions[regions:]
            if (stopped := segment.graph_break) is not None:
                took = seconds_in_a_call(segment.native, report.calls[1])
                counts = id(segment) in run or cause(stopped) not in costs
                costs.add(cause(stopped))  # (of two captures for different calls one costs something in each)
                report.breaks.append(with_cost(stopped, took if counts else None))
        if segments and segments[-1].whole:
            report.count("captured", segments[-1].counts.in_runs([{}]))
    report.recompiles = captured.stats().recompiles
    return report


def seconds_in_a_call(part: NativePart | None, calls: int) -> float | None:
    """What a native part takes, as often as it ran in each of so many calls."""
    if part is None or part.seconds is None:
        return None
    return part.seconds * max(part.runs / max(calls, 1), 1.0)


def cause(item: GraphBreak) -> tuple[str, str, str, int]:
    return item.reason, item.detail, item.file, item.line


def run_by_a_call(members: Iterable[Captured | None], family: dict[int, Captured]) -> Iterator[Segment]:
    """The newest captures: of these members, and of what goes on after their breaks. family: by id, those that were not
    met yet; a continuation that was not captured goes on as an equal one."""
    for member in members:
        if member is not None and not member.segments and not member.left:
            code = member.function.__code__
            member = next((one for one in family.values() if one.segments and one.function.__code__ == code), None)
        if member is not None and family.pop(id(member), None) is not None:
            newest = (member.segments or member.left)[-1]
            yield newest
            yield from run_by_a_call([ref() for ref in newest.continuations], family)


def stats(target: Any) -> Stats:
    """Counts of one captured callable: entries, hits, misses, graphs, breaks, recompiles, cold seconds."""
    captured = captured_of(target)
    if captured is None:
        raise NotCapturableError(f"{target!r:.80} is not something that capture returned")
    return captured.stats()


def captured_functions() -> list[Any]:
    """Everything that ``capture`` returned and that is alive, as it was made; each has ``.report()``."""
    return [Reporter(captured) for captured in sorted(ROOTS, key=lambda captured: captured.serial)]


class Reporter:
    """A captured callable as the command line sees it."""

    def __init__(self, captured: Captured):
        self.captured = captured

    def report(self) -> Report:
        """The report of everything captured so far."""
        report, before = report_of(self.captured), SNAPSHOTS.get(self.captured)
        return report if before is None or report.graphs or report.breaks else before


def reset() -> None:
    """Forget everything that was captured; callables stay captured and start cold."""
    from .hook import forget_frames

    forget_frames()
    for captured in list(ROOTS):
        tell_before_it_goes(captured)
    for captured in list(ALL):
        captured.reset()
    torch_fakes.forget_fakes()


def disable(function: Any) -> Any:
    """The function, never captured: it runs natively, and so does what it calls."""
    if not callable(function):
        raise NotCapturableError(f"disable needs something callable, not {type(function).__name__}")
    if isinstance(function, types.MethodType):
        return types.MethodType(disable(function.__func__), function.__self__)
    if isinstance(function, types.FunctionType):  # itself, with a code of its own: no frame of ours is around it
        made = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                                  function.__defaults__, function.__closure__)  # fmt: skip
        made.__kwdefaults__ = function.__kwdefaults__
        leave_alone(made.__code__)
        return marked(functools.update_wrapper(made, function))

    @functools.wraps(function)
    def native(*args: Any, **kwargs: Any) -> Any:
        return call_unhooked(function, *args, **kwargs)

    return marked(native)


def marked(native: Any) -> Any:
    """A function of ``disable``, as a trace knows it."""
    native.moebius_disabled = True
    return native


def mark_dynamic(tensor: torch.Tensor, dim: int | tuple[int, ...]) -> None:
    """The size of ``tensor`` along ``dim`` varies from call to call: capture it as a symbol the first time already."""
    if not isinstance(tensor, torch.Tensor):
        raise OptionError(f"mark_dynamic: not a tensor, but {type(tensor).__name__} {tensor!r:.60}")
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -tensor.dim() <= d < tensor.dim():
            raise OptionError(f"mark_dynamic: the tensor has {tensor.dim()} dimensions, there is no dimension {d}")
    MARKED[tensor] = {*MARKED.get(tensor, ()), *(d % tensor.dim() for d in dims)}
