"""What a mesh asks of a captured function: experts move to their ranks, and gradients are averaged over the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..bytecode.hidden_frames import hidden
from ..errors import MeshError
from ..options import Options
from ..torch_facts import torch_private
from ..trace.segment import Segment
from ..trace.trace import Trace
from .logs import warn

CONTAINERS = (list, tuple, dict)
met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers of what ranks train


@dataclass
class Placement:
    """Expert parameters that a plan moves onto the ranks before the graph first runs (``lowering.distribution``)."""

    parameters: list[torch.nn.Parameter]
    plan: Any

    @classmethod
    def wanted(cls, segment: Segment, options: Options) -> Placement | None:
        """What is still to be moved for this segment, or None. Experts that stay a loop are said."""
        if options.mesh is None or segment.lowered is None:
            return None
        from moebius.lowering.distribution import parameters_to_place, resolve_plan

        loops = [region for region in segment.lowered.regions if not region.lowered]
        if loops and resolve_plan(options.plan, options.mesh).ranks > 1:
            for loop in loops:
                warn(
                    f"moebius: each rank runs all experts of the loop at {place_of(loop)}, and no token travels, as it "
                    f"stays a loop: {loop.refusal}"
                )
        parameters = parameters_to_place(segment.lowered.gm)
        return cls(parameters, segment.lowered.gm.meta["plan"]) if parameters else None

    def place(self, options: Options) -> None:
        """Collective. If it cannot be done nothing was moved; the whole parameters give the right result too."""
        from moebius.lowering.distribution import DistributionError, PlacementError, place_parameters, place_state

        try:
            place_parameters(self.parameters, options.mesh, self.plan)
        except PlacementError as error:
            warn(f"moebius: experts stay whole on each rank: {error}")
        except DistributionError as error:  # no failure of capture: natively it would go on without the other ranks
            raise MeshError(str(error)) from error
        for optimizer in list(met):  # before it is captured again: then a graph has its state
            place_state(optimizer)


def average_what_it_reaches(function: types.FunctionType, options: Options, args: tuple, kwargs: dict) -> None:
    """Before the function runs, captured or natively: gradients of what it is seen to train are averaged."""
    from moebius.lowering.distribution import look_at_optimizers

    look_at_optimizers()
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    names = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    average(options, function, around([*args, *kwargs.values(), *cells, *names]), True)


def average_what_it_met(attempt: Trace, function: types.FunctionType, options: Options, root: bool) -> None:
    """The same for all that a trace has met."""
    if options.mesh is not None:
        say_what_stays_whole(attempt)
    records = [record.obj for record in attempt.objects.records.values()]
    inputs = [proxy.real for proxy in attempt.tensors.inputs if isinstance(proxy.real, torch.Tensor)]
    average(options, function, [*records, *inputs], root)


@dataclass
class MeshCalls:
    """The calls of a captured function, and of what goes on after its breaks. number: of the call that runs."""

    name: str
    mesh: Any = None
    number: int = 0

    @classmethod
    def begin(cls, function: types.FunctionType, options: Options) -> MeshCalls:
        """From now on, also where it is never called, ranks ask one another where they are when none goes on."""
        if options.mesh is not None:
            from moebius.lowering.distribution.rendezvous import watch_ranks

            watch_ranks(options.mesh)
        return cls(function.__qualname__, options.mesh)

    def told(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which captures a call. The other ranks, which may wait for this one, are told what it raises."""
        if self.mesh is None:
            return run
        from moebius.lowering.distribution.rendezvous import tell_failure

        @hidden
        def telling(*args: Any) -> Any:
            try:
                return run(*args)
            except BaseException as error:
                tell_failure(error, f", where {self.name} was captured")
                raise

        return telling


def say_what_stays_whole(attempt: Trace) -> None:
    """Experts in a checkpoint that Python runs, below which nothing is captured: they are computed, and said, here."""
    given = attempt.frame.stack if attempt.graph_break is not None and attempt.frame is not None else []
    called = [getattr(value, "func", value) if type(value) is functools.partial else value for value in given]
    if any(value is torch.utils.checkpoint.checkpoint for value in called) and any(map(may_have_experts, given)):
        warn(
            "moebius: each rank runs all experts in this checkpoint, and no token travels, as Python runs it. Below "
            "the hooks of fully_shard() they are captured: put the checkpoint into the module that it is given"
        )


def may_have_experts(value: Any) -> bool:
    """Whether it is a module with matrices for each of several, or with several modules of one kind."""
    if not isinstance(value, torch.nn.Module):
        return False
    lists = [[*map(type, module)] for module in value.modules() if isinstance(module, torch.nn.ModuleList)]
    return any(p.dim() == 3 for p in value.parameters()) or any(len(kinds) > len(set(kinds)) for kinds in lists)


def in_a_call(
    run: Callable[..., Any], calls: MeshCalls, options: Options, begins: bool, recompiles: list[Any],
    segments: list[Segment],
) -> Callable[..., Any]:
    """``run`` with its place told: ranks compare the numbers of their calls, and are told what fails in another's."""

    def again() -> str:
        """Captured again, for which reason; a graph break, below which this rank goes on natively."""
        words = [f", captured again as {last.change} ({place_of(last)})" for last in recompiles[-1:]]
        breaks = [found.graph_break for found in segments if found.graph_break is not None]
        words += [f", with a graph break at {place_of(last)} ({last.reason})" for last in breaks[-1:]]
        return "".join(words)

    @hidden
    def call(*args: Any, **kwargs: Any) -> Any:
        with one_call(calls, options, begins, again):
            return run(*args, **kwargs)

    return call


def place_of(reason: Any) -> str:
    return f"{os.path.basename(reason.file)}:{reason.line}"


@contextlib.contextmanager
def one_call(calls: MeshCalls, options: Options, begins: bool, again: Callable[[], str] = str) -> Iterator[None]:
    from moebius.lowering.distribution import nothing_unseen
    from moebius.lowering.distribution.rendezvous import calling

    calls.number += begins
    compiling = torch_private.set_eval_frame(None)  # (torch.compile around this call loses gradients of Sharded)
    try:
        with calling(options.mesh, calls.name, calls.number, again), nothing_unseen():
            yield
    finally:
        torch_private.set_eval_frame(compiling)


def surround(function: types.FunctionType, calls: MeshCalls, options: Options) -> Callable[..., Any] | None:
    """What stands around the calls of a captured function that run as Python (a debugger's, or with moebius switched
    off): the ranks' gradients are averaged in those, too."""
    if options.mesh is None:
        return None

    def begin(args: tuple, kwargs: dict[str, Any]) -> Callable[[BaseException | None], Any]:
        average_what_it_reaches(function, options, args, kwargs)
        around = one_call(calls, options, True)
        around.__enter__()
        return lambda error: around.__exit__(None if error is None else type(error), error, None)

    return begin


def around(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Modules, optimizers and tensors among values, in containers, and in attributes of objects that are neither."""
    for value in values:
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
            yield value
        elif isinstance(value, CONTAINERS) and depth:
            yield from around(list(value.values() if isinstance(value, dict) else value), depth - 1)
        elif isinstance(value, types.MethodType) and depth:
            yield from around([value.__self__], depth - 1)
        elif depth and not isinstance(value, type | types.ModuleType | types.FunctionType):
            yield from around(list(getattr(value, "__dict__", {}).values()), depth - 1)


def average(options: Options, function: types.FunctionType, values: Iterable[Any], root: bool) -> None:
    """Average the gradients of all that is trained among values. root: nothing of the call has run yet. Collective."""
    if options.mesh is None:
        return
    from moebius.lowering.distribution import (
        DistributionError,
        average_gradients,
        is_averaged,
        parts_of,
        place_state,
        resolve_plan,
    )

    values = list({id(value): value for value in values}.values())
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    groups = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    tensors = [*(value for value in values if isinstance(value, torch.Tensor)), *groups]
    for tensor in tensors if root else groups:
        if tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            raise MeshError(
                f"a tensor of shape {tuple(tensor.shape)} requires a gradient and is no torch.nn.Parameter: whether it "
                f"is data of this rank or is trained on all of them cannot be known. With mesh=..., make what is "
                f"trained a Parameter, and let data begin to require gradients within the captured function"
            )
    trained = [*(p for module in modules for p in module.parameters()), *tensors]
    late = [] if root else [t for t in trained if isinstance(t, torch.nn.Parameter) and not is_averaged(t)]
    if any(parameter.grad is not None for parameter in late):
        raise MeshError(
            "the step trains parameters that were not seen before its first backward(), so their gradients are of this "
            "rank alone; pass the model, or the optimizer, to the captured function"
        )
    try:
        alike = {name: getattr(options, name) for name in ("backend", "plan", "precision", "save", "deterministic")}
        program = functools.partial(parts_of, function, alike, modules, optimizers)
        plan = resolve_plan(options.plan, options.mesh)
        average_gradients(modules, tensors, options.mesh, plan, optimizers, program)
    except DistributionError as error:
        raise MeshError(str(error)) from error
    met.update(optimizers)
    for optimizer in optimizers:
        place_state(optimizer)
