"""An operator that fails while a graph runs: the step goes on as Python, from the operator's line.

Everything before the operator has run on the real tensors; no effect on a Python object has been replayed yet. So the
frame can be traced once more, on the objects as they were, up to the operator. What the trace changed by then is
replayed, with the values that the graph had computed; and the frames that it was in (the captured one, and the
inlined calls below it) go on as native code that raises the error where the operator stood. The user's handlers,
finally blocks and contexts run as they would have, and the traceback shows the user's lines.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering import Lowered, where_raised
from moebius.lowering.autocast import depth_of_autocast, leave_to_depth
from moebius.lowering.step import BranchError, InPythonError, MissingGradientError, UnequalSizesError, leave_autocast
from moebius.lowering.step.filters import enter_block, leave_block

from ..bytecode.counting import Counts
from ..bytecode.reported import left, uncounted
from ..bytecode.stack_layout import run_again
from ..codegen.continuation_code import CannotResume
from ..codegen.effect_replay import EffectReplay
from ..codegen.residual import Emitter
from ..hook import call_unhooked
from ..hook.signals import signals_wait
from ..tensors.deferred_state import DeferredState, StateAtCapture
from ..torch_facts import torch_private
from ..values.residual_program import Expression
from ..values.values import CannotRebuild
from .assumptions import Assumptions
from .frame_snapshots import FrameSnapshot, connected, continuation
from .lost_values import Unavailable, Values
from .request import Request
from .speculation import SideExit
from .trace import Trace

# Of one number into another, as ``float(self.calls)`` is one of a count in the graph: nothing but that.

HANDLERS = "moebius: no handler between the failed operator and {} has run: what called it cannot be resumed"


@dataclass
class Reached:
    """How far a graph came. number: of the operator that failed. values: by the number of the node that computed it.

    blocks: how many blocks of ``warnings.catch_warnings`` it has entered and not left. casts: for each such block of
    autocast the number of the frame, from 1 for the captured one, that entered it.
    """

    number: int
    values: dict[Any, Any]
    inputs: dict[str, Any]
    below: types.TracebackType | None
    blocks: int
    casts: list[int]


class FailureHandler:
    """What the residual code of one captured segment asks when its graph raises.

    lowered: what runs. gradients: which ``.grad`` the trace found set, by source. required: which inputs required
    gradients when it began. exits: of its branches on data.
    """

    def __init__(
        self, function: types.FunctionType, n_cells: int, names: tuple[str, ...], assumptions: Assumptions,
        lowered: Lowered,
        gradients: dict[str, bool], required: dict[str, bool], exits: dict[str, SideExit],
    ) -> None:
        self.function, self.n_cells, self.names = function, n_cells, names
        self.lowered, self.gradients, self.required, self.exits = lowered, gradients, required, exits
        self.made_state: list[StateAtCapture] = []  # of optimizers, when it was captured
        self.missed: Callable[[BaseException], None] = lambda error: None  # told where the data was not as captured
        self.switches = torch_private.switches()  # what the call begins with; the graph may have thrown some
        self.assumptions = assumptions.copied()
        # as the graph has them: what decided a branch may have been written by the time of the second trace
        self.assumptions.predictions |= {place: left.expected for place, left in exits.items()}

    def __call__(
        self, failed: list[BaseException], args: tuple, kwargs: dict[str, Any], inputs: tuple
    ) -> list[Callable[[], Any]]:
        """Replay what came before the failed operator. Returns one callable, which goes on from there."""
        with uncounted():
            return [self.after(failed.pop(), args, kwargs, inputs)]

    def after(self, error: BaseException, args: tuple, kwargs: dict[str, Any], inputs: tuple) -> Callable[[], Any]:
        DeferredState(self.made_state).park()  # for good: what runs now makes it anew, if it comes to the optimizer
        if is_kind(error, BranchError):
            self.missed(error)
            left(self, self.exits[error.place].counts)
            return self.exits[error.place].go_on(error.live, args, kwargs)
        reached = locate(error, self.lowered, inputs)
        if is_kind(error, MissingGradientError | UnequalSizesError):
            self.missed(error)
        if reached is None:
            error.add_note(
                "moebius: this backend does not say which operator failed; what the step had done to Python "
                "objects before it is not done"
            )
            return partial(self.raise_again, error)
        try:
            with signals_wait(stops=False):
                return call_unhooked(self.go_on, error, reached, args, kwargs)
        except (CannotRebuild, CannotResume, Unavailable) as reason:
            error.add_note(f"moebius: what the step had done to Python objects before this line is not done: {reason}")
        except Exception as fault:  # a defect of ours must not hide the user's error
            error.add_note(
                "moebius: what the step had done to Python objects before this line is not done "
                f"({type(fault).__name__}: {fault}); please report this"
            )
        return partial(self.raise_again, error, reached)

    def raise_again(self, error: BaseException, reached: Reached | None = None) -> Any:
        """Raise it where the call stood: outside of the contexts that the graph has entered and nobody will leave."""
        torch_private.throw_switches(self.switches)
        if reached is not None:
            leave_to_depth(depth_of_autocast() - len(reached.casts))
            for _ in range(reached.blocks):
                leave_block()
        raise error

    def go_on(self, error: BaseException, reached: Reached, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
        request = Request(self.function, args, kwargs, self.n_cells, self.names)
        trace = Trace(request, self.assumptions, stop_number=reached.number)
        try:
            return self.go_on_from(error, reached, trace, args, kwargs)
        finally:
            trace.release()

    def go_on_from(
        self, error: BaseException, reached: Reached, trace: Trace, args: tuple, kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """The trace up to the operator, its effects replayed, and the frames that it is in going on as native code."""
        trace.tensors.required_before = self.required
        trace.tensors.gradients.found_before = {
            name: reached.inputs.get(name) if was_set else None
            for name, was_set in self.gradients.items()
            if not was_set or name in reached.inputs
        }
        with torch_private.preserved_state():
            torch_private.throw_switches(self.switches)
            trace.run()
        if not trace.stopped:
            raise CannotResume("the step took another way when it was traced again")
        chain = connected(trace.stopped, generators=True)
        if is_kind(error, MissingGradientError | InPythonError):  # nothing of the user's failed: Python goes on
            if len(chain) < len(trace.stopped):
                raise CannotResume("it was called from a function that C code called")
            emitter, again = Emitter(trace.objects, len(args), tuple(kwargs)), advancing(chain)
            if is_kind(error, MissingGradientError):  # after backward()
                native = continuation(emitter, chain, "call", partial(gives, error.given))
            else:  # with what asked for the number
                native = continuation(emitter, chain, "run", None)
                again.append(chain[-1])
            EffectReplay(emitter).effects()
            torch_private.throw_switches(known_switches(trace, chain) or self.switches)
            left(self, ran(trace, again))
            return self.rest(emitter, reached, trace, native)(*args, **kwargs)
        reason: Exception | None = None
        for count in range(len(chain), -1, -1):
            emitter = Emitter(trace.objects, len(args), tuple(kwargs))
            try:
                native = continuation(emitter, chain[:count], "raise", error if count else partial(raise_again, error))
                EffectReplay(emitter).effects()
            except (CannotRebuild, CannotResume) as why:
                reason = why
                continue
            break
        else:
            assert reason is not None
            raise reason
        lost = trace.stopped[count:]
        if any(s.frame.program.handler_at(s.pc) is not None for s in lost):
            error.add_note(HANDLERS.format(lost[0].frame.code.co_qualname))
        # (the graph may have thrown others: those that change nothing for it are dropped)
        torch_private.throw_switches(known_switches(trace, chain[:count]) or self.switches)
        if lost:  # their contexts, which the graph has entered, are never left
            leave_to_depth(depth_of_autocast() - sum(frame > count for frame in reached.casts))
        left(self, ran(trace, advancing(chain[:count])))
        error.__traceback__ = reached.below
        return self.rest(emitter, reached, trace, native)(*args, **kwargs)

    def rest(self, emitter: Emitter, reached: Reached, trace: Trace, native: Expression) -> Callable[..., Any]:
        """The residual code without its graph: the effects so far, and then what the native code gives."""
        found = {proxy.node: proxy.real for proxy in trace.tensors.inputs}
        left = Values(reached.values, reached.inputs, trace.writer, found)
        values = tuple(map(left.of, emitter.outputs))
        return emitter.function(self.function.__name__, lambda: values, [], native)


def advancing(chain: list[FrameSnapshot]) -> list[FrameSnapshot]:
    """The frames whose instruction advances a generator that goes on: it is run again, for that."""
    return [one for one, inner in itertools.pairwise(chain) if inner.frame.shell is not None]


def known_switches(trace: Trace, chain: list[FrameSnapshot]) -> dict[str, Any] | None:
    """Torch's, as the innermost frame's instruction has them; None without a frame."""
    assert trace.domain.switches is not None
    return trace.domain.switches[chain[-1].frame] if chain else None


def ran(trace: Trace, again: list[FrameSnapshot]) -> Callable[[], Counts]:
    """What the user's program has run up to where the trace stopped, but for what these frames begin with again."""
    return trace.counter.so_far([run_again(one.frame, one.pc, one.pc + 1) for one in again])


def raise_again(error: BaseException) -> Any:
    raise error


def gives(value: Any) -> Any:
    """What the call has given that found other gradients: nothing, for ``backward()``."""
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Where the graph stopped
# ----------------------------------------------------------------------------------------------------------------------


def locate(error: BaseException, lowered: Lowered, inputs: tuple) -> Reached | None:
    """The node that raised and the values that were there; None if the traceback does not lead through the graph."""
    found = where_raised(lowered, error)
    if found is None:
        return None
    values = {}
    last = entered = 0
    casts: list[int] = []
    nodes = list(lowered.gm.graph.nodes)
    for node in nodes[: nodes.index(found.node)]:
        number = node.meta.get("number")
        last = number if is_kind(number, int) else last
        entered += (node.target is enter_block) - (node.target is leave_block)
        if node.target is torch.autocast_increment_nesting:
            casts.append(len(node.meta.get("stack", ())) - 1)  # the innermost is autocast's own
        elif node.target is leave_autocast and casts:
            casts.pop()
        if number is not None and found.values.get(node) is not None:
            values[number] = found.values[node]
    number = found.node.meta.get("number")
    if not is_kind(number, int):
        number = number[0] if is_kind(number, tuple) else last + 1
    placeholders = [n.meta.get("source", n.name) for n in nodes if n.op == "placeholder"]
    return Reached(number, values, dict(zip(placeholders, inputs, strict=True)), found.below, entered, casts)
