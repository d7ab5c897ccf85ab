"""What capture asks lowering for: a captured graph made ready to run, and where its code raised."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from moebius.kernels import ExpertsInputError
from moebius.kernels.contract import Options as KernelOptions
from moebius.kernels.precision import parse
from moebius.lowering.attention import finish_with_ours
from moebius.lowering.backends import OWN, as_tuple, check_backend, compile_graph, compile_whole, name_of, run_as_is
from moebius.lowering.draft import copy_graph, finish
from moebius.lowering.errors import ContractError, LoweringError, defect
from moebius.lowering.experts.loops import find_loops, unlowered_region
from moebius.lowering.graph import CapturedGraph, ExpertRegion, Lowered, LoweringOptions
from moebius.lowering.layers import lower_layers
from moebius.lowering.pipeline import run_passes
from moebius.lowering.repeats import Reached, whole_code, written_once
from moebius.lowering.roofline.meter import METER
from moebius.lowering.roofline.slots import RECORDER
from moebius.lowering.step import checkpoint, inference


def lower(graph: CapturedGraph, options: LoweringOptions) -> Lowered:
    """Make a captured graph ready to run.

    ``options.backend``: "moebius" runs the lowered graph as it is, "eager" the captured one; a name that torch.compile
    knows, or a callable ``(gm, example_inputs) -> callable``, gets the lowered graph. The captured graph is not
    changed. Where a pass fails, by an error of ours, it runs as it was captured (``Lowered.fault``). Raises
    UnknownBackendError (a ValueError) for a backend that does not exist, LoweringError for options that do not go
    together, and whatever a foreign backend raises.
    """
    lowered = lowered_for(graph, options)
    if METER.on:
        lowered.fn = METER.around(graph, lowered, options.backend not in OWN)
    if RECORDER.on and options.mesh is None:  # (a rank sees the experts that it has)
        lowered.fn = RECORDER.around(graph, lowered)
    return lowered


def lowered_for(graph: CapturedGraph, options: LoweringOptions) -> Lowered:
    check_options(options)
    if options.backend == "eager":
        return as_captured(graph, options, "backend='eager' runs the captured graph as it is")
    try:
        if (parts := lower_layers(graph, options)) is not None:
            repeats = parts.repeats()
            return Lowered(as_tuple(parts.outer.gm, repeats.forward), None, parts.regions(), repeats)
        work = run_passes(graph, options)
        made = ready(work.gm, work.regions, options.mesh is None) if options.backend in OWN else None
    except Exception as error:  # of ours: what was captured works as it is
        if options.mesh is not None or (isinstance(error, LoweringError) and not isinstance(error, ContractError)):
            raise
        return as_captured(graph, options, defect(error), error)
    return made or Lowered(compiled(finish(work.gm), options), work.gm, work.regions)


def compiled(gm: fx.GraphModule, options: LoweringOptions) -> Callable[..., tuple]:
    """What a foreign backend makes of it. Raises WholeStepRefusedError where it is to be one graph."""
    return (compile_whole if options.whole_step else compile_graph)(gm, options.backend)


def as_captured(
    graph: CapturedGraph, options: LoweringOptions, reason: str, fault: Exception | None = None
) -> Lowered:
    """The graph without lowering's passes. reason: why, for its expert regions. fault: of ours, if that is why."""
    regions = [unlowered_region(loop, reason) for loop in find_loops(graph.gm)]
    gm = graph.gm
    if checkpoint.is_marked(gm) or inference.marks_of(gm.graph):
        gm = copy_graph(gm)
        checkpoint.outline(gm)
        inference.outline_modes(gm)
    if options.backend not in OWN:
        return Lowered(compiled(finish(gm), options), gm, regions, fault=fault)
    made = ready(gm, regions) if fault is None else Lowered(run_as_is(finish(gm)), gm, regions)
    made.fault = fault
    return made


def ready(gm: fx.GraphModule, regions: list[ExpertRegion], chains: bool = False) -> Lowered:
    """The graph with code that runs it. chains: whether operators element by element may run as one, and attention as
    ours."""
    repeats = written_once(gm, chains)
    if repeats is None:
        return Lowered(run_as_is(finish_with_ours(gm) if chains else finish(gm)), gm, regions)
    return Lowered(as_tuple(gm, repeats.forward), gm, regions, repeats)


def where_raised(lowered: Lowered, error: BaseException) -> Reached | None:
    """Where a graph's code raised; None if the traceback does not lead through it (a foreign backend ran it)."""
    return whole_code(lowered.gm, error) if lowered.repeats is None else lowered.repeats.reached(error)


def check_options(options: LoweringOptions) -> None:
    """Raise LoweringError for options that cannot be followed."""
    check_backend(options.backend)
    try:
        parse(options.precision)
        KernelOptions(save=options.save).check()
    except ExpertsInputError as error:
        raise LoweringError(str(error)) from None
    if options.backend == "eager" and (options.precision is not None or options.save != "default"):
        raise LoweringError(
            "backend='eager' runs the captured graph as it is, so precision and save, which are of lowered experts, "
            "change nothing there; leave them out, or use backend='moebius'"
        )
    if options.mesh is not None and options.backend == "eager":
        raise LoweringError(
            f"backend={name_of(options.backend)!r} runs the captured graph as it is, so experts cannot be placed on "
            "a mesh; use backend='moebius' or leave mesh=None"
        )
    if options.mesh is None and options.plan != "auto":
        raise LoweringError(f"plan={options.plan!r:.60} says how experts lie on a mesh; give mesh=, too")
    if options.mesh is not None:
        from moebius.lowering.distribution import DistributionError, resolve_plan  # torch.distributed: only with a mesh

        try:
            resolve_plan(options.plan, options.mesh)
        except DistributionError as error:
            raise LoweringError(str(error)) from None
