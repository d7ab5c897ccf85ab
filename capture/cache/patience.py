"""Functions below a step, and what follows its breaks, whose captures do not pay: calls do not come again.

Each would be captured many times, and one capture takes as long as some hundred calls. After a few in a row that served
less often than they were made, a call is captured only where something new was learnt of what varies, or the older ones
serve after all. A function below native code that is little more than Python is left to Python after its first calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..bytecode.hidden_frames import apart, hidden
from ..bytecode.reported import uncounted
from ..hook import Entry, decline, leave_alone, leave_to_call
from ..hook.signals import signals_wait
from ..trace.segment import Segment
from .calls import is_watched

PATIENCE = 4  # captures in a row
TRIAL = 8  # calls


def on_trial(captured: Any, segment: Segment) -> Callable[..., Any]:
    """What runs where a capture fits. captured: the ``Captured``."""
    weighs = captured.met_as is not None and captured.patience.weighed < TRIAL
    return functools.partial(run_on_trial, captured, segment) if weighs else captured.runner(segment)


@hidden
def run_on_trial(captured: Any, segment: Segment, *args: Any, **kwargs: Any) -> Any:
    """One of the first calls that fit of a function below native code."""
    with signals_wait(), uncounted():
        run = apart(weigh, captured, segment)
    return leave_to_call(run, args, kwargs)


def weigh(captured: Any, segment: Segment) -> Callable[..., Any]:
    """What is run now; after some calls the function is left to Python, or captured for good."""
    captured.patience.weighed += not is_watched()
    if captured.patience.weighed == TRIAL and (leave := left_to_python(captured)) is not None:
        captured.given_up = "it has more pieces than operators"
        leave(captured.met_as)
    elif captured.patience.weighed >= TRIAL and segment in captured.segments:
        captured.enter_again(segment, captured.runner(segment), runs=True)
    return captured.settled(captured.function) if captured.given_up else captured.runner(segment)


def left_to_python(captured: Any) -> Callable[[Any], None] | None:
    """How a function that was met below a native call is left to Python, where that is faster: it calls nothing of the
    user's and has more pieces than there are operators in them, or has no operator, below it either, and no break. None
    where it is not. (Not what the clock says: it would decide how results are rounded. Where functions below it would
    be captured in its stead, that costs more.) captured: the ``Captured``."""
    parts = [captured]
    for part in parts:
        parts += [one for one in part.children if one.beginning is not None]
    pieces = [segment for part in parts for segment in part.segments]
    n_operators = sum(map(operators, pieces))
    if not n_operators and all(piece.graph_break is None for piece in pieces):
        return leave_alone
    functions = {code for piece in pieces for code in piece.counts.functions}
    return decline if n_operators < len(pieces) and len(functions) <= 1 else None


def operators(piece: Segment) -> int:
    """How many stand in its graph, and in the bodies of its loops and branches."""
    if piece.captured is None:
        return 0
    graphs = [getattr(module, "graph", None) for module in piece.captured.gm.modules()]
    return sum(node.op.startswith("call") for graph in graphs if graph is not None for node in graph.nodes)


class Patience:
    """Of one captured callable. looks: calls in a row that were not captured for that.
    weighed: of one below native code, calls that fit, up to the ``TRIAL``th."""

    def __init__(self) -> None:
        self.looks = self.weighed = 0

    def lasts(self, alike: list[Segment], entry: Entry, learnt: bool, step: int) -> bool:
        """Whether the call is worth a capture. alike: those for the same modules, newest last. step: which it is; what
        was captured in it may serve in the next."""
        latest = [segment for segment in alike if segment.captured_in < step][-PATIENCE:]
        hits = {program: count for program, _, count in entry.targets}
        served = sum(hits.get(segment.guards.program, 0) for segment in latest)
        lasts = learnt or len(latest) < PATIENCE or served >= PATIENCE
        self.looks = 0 if lasts else self.looks + 1
        return lasts
