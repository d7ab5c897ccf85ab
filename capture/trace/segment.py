"""From a finished trace to something that runs: the lowered graph, the residual function and the guards."""

from __future__ import annotations

import builtins
import functools
import os
import sys
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx

from moebius.interpreter import UNSET, Frame, is_kind
from moebius.lowering import OWN, CapturedGraph, ExpertRegion, Lowered, lower, where_raised
from moebius.lowering.autocast import leaving_blocks
from moebius.lowering.step import going_on, treats_each_alone

from ..bytecode.counting import Counts
from ..bytecode.hidden_frames import hidden
from ..bytecode.liveness import FRAME_READERS
from ..bytecode.progress import stage
from ..bytecode.stack_layout import callee_position
from ..bytecode.user_code import shown_code
from ..codegen.continuation_code import Beginning, CannotResume
from ..codegen.effect_replay import EffectReplay
from ..codegen.native_frames import as_python, left_first, over, skipped
from ..codegen.native_parts import NativePart
from ..codegen.residual import Emitter
from ..codegen.resume import Continuation
from ..guards.program import CompiledGuards
from ..guards.shapes import guard_sizes
from ..heap.identities import is_bare
from ..heap.objects import Objects
from ..heap.records import HEAP_TYPE
from ..options import Options
from ..report.failure import lowering_failed
from ..report.records import GraphBreak
from ..tensors.deferred_state import DeferredState
from ..tensors.overlaps import memory_of
from ..torch_facts import torch_fakes, torch_private
from ..values.numbers import READINGS, Number
from ..values.residual_program import Call, Literal, Write
from ..values.values import Break, CannotRebuild, TensorProxy
from .blockers import name_blockers
from .failures import FailureHandler
from .trace import ASK_NUMBERS, Trace

LIBRARIES = ("torch", "moebius", "builtins", "functools", "contextlib", "numpy")


class Owner(Protocol):
    """The captured function that a segment is of."""

    beginning: Beginning | None
    children: list[Any]

    def make_resume(self, beginning: Beginning, varying: set[str]) -> Any:
        """The captured continuation of its frame. varying: places with numbers that the graph has computed."""

    def below(self, callee: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that runs natively, so that the user's functions below it are captured."""

    def settled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a part of the call, with what the options switch on."""


@dataclass(eq=False)
class Segment:
    """One captured part of a frame, from its entry to its return or its graph break.

    run: called with the call's arguments in place of the function. guards: when it may be. captured: None without an
    operator in it.
    whole: False when the frame runs natively after all (``graph_break`` says why). call: how many positional arguments
    it is for, and the names of the others. hits_before: the entry's count of warm calls when it was captured.
    captured_in: the number of that call. looked_at: the next one in which another was captured, and the calls that it
    had served by then.
    modules: those among the call's arguments. owners: the graph's inputs that are an optimizer's state -> those that
    are their parameters; None where the graph cannot go on without a gradient. watched: the models and optimizers that
    it goes with. counts: the user's instructions that a run of it stands for. native: what runs after it, at a break.
    continuations: the captured functions that may go on after that.
    """

    run: Callable[..., Any]
    guards: CompiledGuards
    captured: CapturedGraph | None
    graph_break: GraphBreak | None
    regions: list[ExpertRegion] = field(default_factory=list)
    lowered: Lowered | None = None
    instructions: int = 0
    native: NativePart | None = None
    counts: Counts = field(default_factory=Counts)
    whole: bool = True
    seconds: float = 0.0
    failures: FailureHandler | None = None
    hits_before: int = 0
    captured_in: int = 0
    looked_at: tuple[int, int] | None = None
    call: tuple[int, tuple[str, ...]] = (0, ())
    modules: tuple[weakref.ref[torch.nn.Module], ...] = ()
    owners: dict[str, str] | None = None
    watched: list[weakref.ref[Any]] = field(default_factory=list)
    continuations: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def graph(self) -> CapturedGraph | None:
        """Its graph, for who counts graphs: one without an operator, which hands on its inputs, is none."""
        graph = self.captured
        kinds = () if graph is None else {node.op for node in graph.gm.graph.nodes}
        return graph if {"call_function", "call_method", "call_module"}.intersection(kinds) else None


@torch_private.as_first_rank()
def build(
    attempt: Trace,
    options: Options,
    owner: Owner,
    deferred_state: DeferredState,
    started: float,
) -> Segment:
    """Everything that a warm call needs. deferred_state: optimizer state between the calls."""
    if attempt.recorder is not None:
        attempt.recorder.keep(ended_by(attempt.graph_break))
    request = attempt.request
    n_positional, kwnames = len(request.args), tuple(request.kwargs)
    emitter, others = Emitter(attempt.objects, n_positional, kwnames), len(owner.children)
    code = request.code
    name = code.co_name
    attempt.made.put_back()
    try:
        if attempt.whole_natively:
            raise CannotRebuild(attempt.whole_natively)
        if attempt.graph_break is None:
            result = emitter.value(attempt.result)
        else:
            result = continue_natively(attempt, emitter, owner)
        EffectReplay(emitter).effects()
        refuse_abandoned(attempt, emitter)
        captured, lowered = make_graph(attempt, emitter, options, started)
        name_blockers(lowered.regions if lowered else [], attempt.assumptions.blockers, attempt.assumptions.split)
        inputs = graph_inputs(attempt, emitter, lowered, options)
        owners = state_owners(attempt)
        foreign = options.backend not in OWN  # which does not say where it failed: nothing goes on inside its blocks
        graph = None if lowered is None else with_missing_gradients(lowered, owners, deferred_state, foreign)
        failures = on_failure(attempt, lowered, deferred_state)
        run = emitter.function(name, graph, inputs, result, failures, label_of(captured))
        attempt.shows_context = attempt.machine.raised and (attempt.objects.asked_context or emitter.has_exceptions())
        if attempt.shows_context and attempt.handled is not None:
            raise CannotRebuild("what its caller handles is the context of an exception that it raises")
        guards = finish_guards(attempt, n_positional, kwnames)
    except (CannotRebuild, CannotResume, Break) as error:  # Break: a size that lives on comes from no tensor
        attempt.made.take_away()
        return run_whole_natively(attempt, str(error), n_positional, kwnames, owner)
    except BaseException:  # an error of ours: the call runs natively, and finds no state that it has not made
        attempt.made.take_away()
        raise
    deferred_state.made += attempt.made.made
    attempt.made = DeferredState([])
    if captured is not None:
        captured.cold_seconds = time.perf_counter() - started
        captured.times["guards and code"] = captured.cold_seconds - sum(captured.times.values())
    return Segment(
        run,
        guards,
        captured,
        attempt.graph_break,
        lowered.regions if lowered else [],
        lowered,
        attempt.domain.instructions,
        attempt.native,
        attempt.counts(),
        failures=failures,
        call=(n_positional, kwnames),
        owners=owners,
        continuations=[weakref.ref(child) for child in owner.children[others:]],
    )


def ended_by(graph_break: GraphBreak | None) -> str:
    """The end of a capture, for who walks through it."""
    if graph_break is None:
        return "the function returns"
    return f"graph break {graph_break.code}: {graph_break.reason}: {graph_break.detail} ({graph_break.hint})"


def label_of(captured: CapturedGraph | None) -> str:
    """What a profiler shows of a graph."""
    if captured is None:
        return ""
    return f"moebius: {captured.name} ({os.path.basename(captured.file)}:{captured.line})"


def refuse_abandoned(attempt: Trace, emitter: Emitter) -> None:
    """A generator that is left inside a try- or with-block, or in a `yield from`, is closed when it dies. That runs
    the rest of the block, or closes the iterator.

    When that is, tracing does not see: the frame runs natively, unless the generator goes on living after the segment.
    """
    ours = [frame.shell() for frame in attempt.domain.generators if frame.shell is not None]
    for frame in attempt.domain.generators:
        if not frame.suspended or frame.shell is None:
            continue
        generator = frame.shell()
        if generator is not None and id(generator) in emitter.built:
            continue
        delegate = attempt.domain.machine.delegate(frame)
        if hasattr(type(delegate), "close") and not (delegate in ours and is_its_own(frame)):
            raise CannotRebuild(f"{frame.code.co_qualname} is left in a `yield from`, and closes what it came from")
        if runs_when_closed(frame):
            raise CannotRebuild(f"{frame.code.co_qualname} is left inside a try- or with-block, and closed")


def is_its_own(frame: Frame) -> bool:
    """Whether what the frame yields from is the result of a call or a local of its own: nobody else's, as code is."""
    instructions, code = frame.program.instructions, frame.code
    begins = max(i for i in range(frame.pc) if instructions[i].opname in ("GET_YIELD_FROM_ITER", "GET_AWAITABLE"))
    source = instructions[begins - 1]
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return source.opname.startswith("CALL") or (source.opname == "LOAD_FAST" and source.argval not in given)


def runs_when_closed(frame: Frame) -> bool:
    """Whether GeneratorExit, raised where the frame is suspended, runs anything in it: not what only asks whether the
    exception is one of Python's own that it is not (``except IndexError:``)."""
    instructions = frame.program.instructions
    handler = frame.program.handler_at(frame.pc)
    if handler is None or instructions[handler[0]].opname != "PUSH_EXC_INFO":
        return False
    index = handler[0] + 1
    while instructions[index].opname == "LOAD_GLOBAL":
        name, test, jump = instructions[index].argval, *instructions[index + 1 : index + 3]
        kind = None if name in frame.globals else getattr(builtins, name, None)
        passed = test.opname == "CHECK_EXC_MATCH" and jump.opname in ("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_IF_FALSE")
        if not passed or not (is_kind(kind, type) and issubclass(kind, Exception)) or jump.target is None:
            return True
        index = jump.target
    outer = frame.program.handler_at(index)
    if instructions[index].opname != "RERAISE" or outer is None:
        return True
    ending = [instruction.opname for instruction in instructions[outer[0] : outer[0] + 3]]
    last = frame.program.handler_at(outer[0] + 2)  # of a try-block around this one
    return ending != ["COPY", "POP_EXCEPT", "RERAISE"] or (
        last is not None and instructions[last[0]].opname == "PUSH_EXC_INFO"
    )


def state_owners(attempt: Trace) -> dict[str, str] | None:
    """Whose state the inputs of the graph are that are an optimizer's; None where only Python can go on if a batch
    leaves out a gradient."""
    gradients, stop = attempt.tensors.gradients, attempt.graph_break
    if gradients.check is None or not gradients.check.args or gradients.asked_by_others:
        return None
    if stop is not None and any(treats_each_alone(place[0]) for place in stop.stack):
        return None  # what goes on there has the lists of all parameters
    return gradients.owners()


def with_missing_gradients(
    lowered: Lowered, owners: dict[str, str] | None, deferred_state: DeferredState, foreign: bool
) -> Callable[..., tuple]:
    """What runs the graph; where the code after backward allows, it goes on without gradients that a batch left out."""
    if owners is None:
        casts = any(node.target is torch.autocast_increment_nesting for node in lowered.gm.graph.nodes)
        return leaving_blocks(lowered.fn) if casts and foreign else lowered.fn

    def locate(error: BaseException) -> tuple[fx.Node, dict[fx.Node, Any]] | None:
        found = where_raised(lowered, error)
        return None if found is None else (found.node, dict(found.values))

    return going_on(lowered.fn, locate, owners, deferred_state.park)


def on_failure(attempt: Trace, lowered: Lowered | None, deferred_state: DeferredState) -> FailureHandler | None:
    if lowered is None:
        return None
    request, assumptions = attempt.request, attempt.began_with
    was_set, exits = attempt.tensors.gradients.was_set, attempt.speculation.exits
    required = {p.source.name: p.required for p in attempt.tensors.inputs if p.source is not None}
    before = was_set, required
    handler = FailureHandler(request.function, request.n_cells, request.names, assumptions, lowered, *before, exits)
    handler.made_state = deferred_state.made
    return handler


def finish_guards(attempt: Trace, n_positional: int, kwnames: tuple[str, ...]) -> CompiledGuards:
    text = "global state unchanged (grad mode, autocast, default dtype, modes, determinism)"
    attempt.guards.answers("torch", text, *attempt.state)  # before sizes are asked for, which some modes answer
    attempt.tensors.distinct_inputs()
    attempt.objects.distinct_when_changed()
    attempt.domain.array_inputs.guard_memory()
    attempt.domain.walks.keep_apart()
    guard_sizes(attempt.world, attempt.tensors, attempt.guards)
    if attempt.shows_context and attempt.handled is None:
        attempt.guards.answers("sys.exception()", "no exception is being handled", (sys.exception, None))
    elif attempt.shows_context:
        attempt.guards.answers("sys.exception()", "an exception is being handled", (is_handling, True))
    return CompiledGuards(attempt.guards, n_positional, kwnames)


def is_handling() -> bool:
    """Whether the caller is handling an exception: it becomes the context of what is raised."""
    return sys.exception() is not None


def run_whole_natively(
    attempt: Trace, why: str, n_positional: int, kwnames: tuple[str, ...], owner: Owner
) -> Segment:
    """No residual code can be made for this break: the frame runs as Python, its callees are captured."""
    why = attempt.world.told(why)
    if attempt.graph_break is None:
        file, line = attempt.line()
        attempt.graph_break = GraphBreak(
            "result cannot be rebuilt",
            why,
            "return tensors and plain containers",
            file,
            line,
            attempt.request.function.__qualname__,
            "RETURN_VALUE",
        )
    else:
        attempt.graph_break.detail += f" (the whole frame runs natively: {why})"
    attempt.objects.guards.forget(attempt.objects.dying)
    alone, code = as_python(attempt.request.function, owner.beginning)
    broken = attempt.graph_break
    by = "" if attempt.speculation.exits else attempt.raises_by  # (which this frame meets as well)
    native = NativePart(code, functools.partial(broken.did_not_come, by) if by else None)
    run = native.timed(owner.below(alone))
    return Segment(
        run if owner.beginning is None else left_first(owner.settled(run)),
        finish_guards(attempt, n_positional, kwnames),
        None,
        attempt.graph_break,
        instructions=attempt.domain.instructions,
        native=native,
        whole=False,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The graph
# ----------------------------------------------------------------------------------------------------------------------


def live_inputs(attempt: Trace) -> list[TensorProxy]:
    """Inputs that the graph uses, in the order of its placeholders."""
    by_node = {p.node: p for p in attempt.tensors.inputs}
    return [by_node[n] for n in attempt.writer.scope.graph.nodes if n.op == "placeholder"]


def graph_inputs(attempt: Trace, emitter: Emitter, lowered: Lowered | None, options: Options) -> list[str]:
    """Names of the graph's inputs. Parameters whose experts live on ranks come in as this rank's part."""
    if lowered is None:
        return []
    names = [emitter.load(p.source) for p in live_inputs(attempt) if p.source is not None]
    if options.mesh is None:
        return names
    from moebius.lowering.distribution import input_conversions, to_graph_input

    convert = emitter.constant(to_graph_input)
    for place, how in enumerate(input_conversions(lowered.gm, options.for_lowering())):
        if how != "as is":  # once, before the graph: ranks may communicate, and what handles a failure has it too
            rows = f"m_rows_{place}"
            emitter.loads.append(Write(rows, Call(convert, (names[place], Literal(how)))))
            names[place] = rows
    return names


def make_graph(
    attempt: Trace, emitter: Emitter, options: Options, started: float
) -> tuple[CapturedGraph | None, Lowered | None]:
    """Close the graph with the outputs that residual code needs, and lower it. (None, None): nothing to run."""
    writer = attempt.writer
    graph = writer.scope.graph
    # a handler may need what cannot be read again: it stays to the graph's end
    readings = [n for n in graph.nodes if n.op == "call_function" and n.target in READINGS]
    graph.output((*(writer.argument(o) for o in emitter.outputs), *readings))
    for node in reversed([n for n in graph.nodes if n.op == "placeholder"]):
        if not node.users:
            graph.erase_node(node)
    if not any(n.op in ("call_function", "call_method") for n in graph.nodes) and not emitter.outputs:
        return None, None
    gm = writer.module()
    gm.graph.lint()
    real = [(proxy.node, proxy.real) for proxy in attempt.tensors.inputs if is_kind(proxy.real, torch.Tensor)]
    for node, tensor in real:
        node.meta["tensor"] = weakref.ref(tensor)
    for place, memory in memory_of([tensor for _, tensor in real]).items():
        real[place][0].meta["memory"] = memory
    code = shown_code(attempt.request.function)
    first = next(
        (n.meta["where"] for n in gm.graph.nodes if n.op in ("call_function", "call_method") and n.meta.get("stack")),
        None,
    )
    file, line, _ = (first and attempt_root(gm, code)) or (code.co_filename, code.co_firstlineno, "")
    captured = CapturedGraph(gm, file, line, time.perf_counter() - started, code.co_qualname)
    with torch_fakes.tracing(attempt.world):
        stage("lowering")
        whole_step = options.backend not in OWN and attempt.assumptions.whole_step
        partial = captured.name if attempt.assumptions.follows_data else ""
        wanted = replace(options.for_lowering(), whole_step=whole_step, partial=partial)
        began = time.perf_counter()
        lowered = lower(captured, wanted)
        by = "lowering" if options.backend in OWN else "backend"
        captured.times = {"capture": began - started, by: time.perf_counter() - began}
    if lowered.fault is not None:
        captured.fault = lowering_failed(attempt.request.function, lowered.fault)
    for graph_module in {captured.gm, *lowered.modules}:
        torch_private.forget_source_with(graph_module)
    return captured, lowered


def attempt_root(gm: fx.GraphModule, code: types.CodeType) -> tuple[str, int, str] | None:
    """The root frame's line of the first operator; below a call of ours, that of the frame which it calls."""
    for node in gm.graph.nodes:
        root = next((place for place in node.meta.get("stack") or () if place[2] == code.co_qualname), None)
        if node.op in ("call_function", "call_method") and root is not None and root[0] == code.co_filename:
            return root
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Going on after a graph break
# ----------------------------------------------------------------------------------------------------------------------


def continue_natively(attempt: Trace, emitter: Emitter, owner: Owner) -> Call:
    """What runs the broken instruction natively and goes on in the captured continuation of the frame."""
    frame = attempt.frame
    if frame is None:
        raise CannotResume("it was not entered")
    going_on = Continuation(frame, attempt.domain.root_handled, attempt.chooses)
    open_places = passing(frame, attempt.objects)
    asked = attempt.graph_break is not None and attempt.graph_break.reason in ASK_NUMBERS
    on_data = asked or attempt.assumptions.follows_data
    resumes = [owner.make_resume(Beginning(frame.code, exit_, on_data), open_places) for exit_ in going_on.exits]
    native = attempt.native = NativePart(None)
    if attempt.raises_by and attempt.graph_break is not None:
        returned = functools.partial(attempt.graph_break.did_not_come, attempt.raises_by)
        resumes = [unless_raised(resume, returned, native) for resume in resumes]
    native.code = native_code = skipped(going_on.native_code(resumes))
    run = over(native_code, attempt.request.function.__globals__, len(going_on.state.cells))
    index = {n: i for i, n in enumerate(frame.program.localsplus)}
    callee = callee_position(frame.instruction, frame.stack)
    parts = [emitter.value(cell_of(frame, index[n])) for n in going_on.state.cells]
    # (a resume function's own arguments have the names that its continuations use again: go by position, not by name)
    parts += [emitter.value(frame.locals[index[n]]) for n in going_on.state.locals]
    for position, value in enumerate(frame.stack):
        if position in going_on.state.nulls:
            continue
        part = emitter.value(going_on.exceptions.get(position, value))
        hooked = position == callee and wants_hook(value)
        parts.append(Call(emitter.constant(owner.below), (part,)) if hooked else part)
    if going_on.whole_loop or (callee is None and any(may_run_code(v) for v in frame.stack[-3:])):
        run = owner.below(run)  # a property, an operator or a context of the user's
    run = left_first(owner.settled(attempt.native.timed(run)))
    return Call(emitter.constant(run), tuple(parts))


def unless_raised(go_on: Callable[..., Any], returned: Callable[[], None], native: NativePart) -> Callable[..., Any]:
    """``go_on``. Where the step was seen to raise, Python comes here only if it does not: with what capture saw, the
    error was one of ours, and the report says so; in another call the instruction may have met something else."""

    @hidden
    def noticed(*args: Any, **kwargs: Any) -> Any:
        result = go_on(*args, **kwargs)
        if not native.raised:
            returned()
        return result

    return noticed


def passing(frame: Any, objects: Objects) -> set[str]:
    """The names, in the rest of the frame, of locals that are others in each call: numbers that the graph computes (a
    sum of losses, what a clock says), and modules without parameters that the frame has made (a criterion)."""
    found = set()
    for name, value in zip(frame.program.localsplus, frame.locals, strict=True):
        place = f"L[{name!r}]"
        parts = enumerate(value) if type(value) in (list, tuple) else ()
        for where, each in ((place, value), *((f"{place}[{i}]", item) for i, item in parts)):
            record = objects.record_of(each) if is_bare(each) else None
            made = is_bare(each) and (objects.is_new(each) or (record is not None and not record.source.static))
            if made or (issubclass(type(each), Number) and each.node is not None):
                found.add(where)
    return found


def cell_of(frame: Any, index: int) -> Any:
    cell = frame.locals[index]
    if not is_kind(cell, types.CellType):
        raise CannotResume("a cell is not made yet")
    return cell


def may_run_code(value: Any) -> bool:
    """Whether an operator or attribute of this object can be a function of the user's."""
    kind = value if issubclass(type(value), type) else type(value)
    return bool(kind.__flags__ & HEAP_TYPE) and (kind.__module__ or "").split(".")[0] not in LIBRARIES


def wants_hook(callee: Any) -> bool:
    """Whether user code can be below a call: functions, methods and objects that are not torch's own."""
    if is_kind(callee, types.MethodType):
        owner = type(callee.__self__)
        if issubclass(owner, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            return False
        callee = callee.__func__
    if is_kind(callee, types.FunctionType) and not FRAME_READERS.isdisjoint(callee.__code__.co_names):
        return False  # it looks for its caller, who is to be the next frame
    if is_kind(callee, types.FunctionType | type):
        return (callee.__module__ or "").split(".")[0] not in LIBRARIES
    return (
        not is_kind(callee, types.BuiltinFunctionType | types.MethodDescriptorType | TensorProxy)
        and callable(callee)
        and callee is not UNSET
    )
