"""A call whose data was not as its graph holds it to be: what is learnt from that, and when it is captured again."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from moebius.lowering.step import BranchError, ReachedElsewhereError, UnequalSizesError

from ..trace.assumptions import FOREIGN, LEFT_OUT, Assumptions
from ..trace.segment import Segment
from .interfaces import Captured

# Of one branch on data, or of sizes that meet, before it is a graph break; one that ends a ``while`` loop has none.
MAX_MISSES = 2
RARE = 20  # a branch on data that leaves its graph once in so many calls changes nothing


def listen(captured: Captured, segment: Segment) -> None:
    """What is captured tells its function what its runs find otherwise."""
    me = weakref.ref(captured)
    if segment.failures is not None:
        segment.failures.missed = functools.partial(missed, me, segment.guards.program)
    for later in segment.guards.later:
        later.changed = functools.partial(changed_before_backward, me, weakref.ref(segment))


def missed(captured: weakref.ref[Any], program: Any, error: BaseException) -> None:
    """The data of a call was not as the segment with these guards holds it to be."""
    owner = captured()
    if owner is None:
        return
    if isinstance(error, BranchError):
        went_otherwise(owner, error, program)
    elif isinstance(error, UnequalSizesError):
        met_otherwise(owner, error, program)
    elif isinstance(error, ReachedElsewhereError):
        capture_again(owner, str(error))
    else:
        keep_backward_outside(owner, str(error))


def changed_before_backward(
    captured: weakref.ref[Any], captured_for: weakref.ref[Segment], what: str, name: str, place: str
) -> None:
    """A backward that the caller ran found another value than its graph was made of: it runs natively from now on.
    name: of what has that backward."""
    owner, segment = captured(), captured_for()
    if owner is not None and segment in owner.segments:
        owner.assumptions.natively.add(name)
        code = owner.function.__code__
        owner.tell_recompile(place, "is as it was at the call", "changed", code.co_filename, code.co_firstlineno, what)
        owner.forget(segment)


def keep_backward_outside(captured: Captured, found: str) -> None:
    """A batch left parameters without gradients that the step was captured with: backward runs between two graphs
    from now on, and the second has the gradients that are there for inputs."""
    captured.assumptions.whole_step, captured.assumptions.outside = False, LEFT_OUT
    capture_again(captured, found, LEFT_OUT[1])


def leave_backward_outside(assumptions: Assumptions, why: str) -> None:
    """A foreign backend cannot have the whole step: it gets what stands before and after backward, as two graphs."""
    assumptions.whole_step, assumptions.outside = False, (f"{FOREIGN[0]}, as {why}", FOREIGN[1])


def capture_again(captured: Captured, found: str, hint: str = "") -> None:
    """What a backward gave gradients to is not what the captures have."""
    code = captured.function.__code__
    place = (code.co_filename, code.co_firstlineno)
    captured.tell_recompile("backward()", "gives every parameter a gradient", found, *place, hint)
    for segment in [*captured.segments]:
        captured.forget(segment)


def went_otherwise(captured: Captured, error: BranchError, program: Any) -> None:
    """A branch on data left its graph. A rare event changes nothing; else the step is captured again with the
    branch as it went now, and with a graph break at a branch that keeps changing."""
    branch = error.place.rpartition(", ")[0]
    found = too_often(captured, branch, program)
    if found is None:
        return
    segment, misses = found
    assert segment.failures is not None  # it has told this
    side_exit = segment.failures.exits[error.place]
    captured.tell_recompile(
        "branch on data", f"goes {not error.taken}", str(error.taken), side_exit.file, side_exit.line,
        "use torch.where, or keep the branch out of the step",
    )  # fmt: skip
    captured.assumptions.predictions[error.place] = error.taken
    if side_exit.ends or misses > MAX_MISSES:  # (how many iterations there are is another number in each call)
        captured.assumptions.unpredictable.add(branch)
    captured.forget(segment)
    captured.left = [segment]


def met_otherwise(captured: Captured, error: UnequalSizesError, program: Any) -> None:
    """Two sizes were not equal. A rare event changes nothing; else the operator is a graph break from now on."""
    found = too_often(captured, error.place, program)
    if found is not None and found[1] > MAX_MISSES:
        file, _, line = error.place.partition(" in ")[0].rpartition(":")
        was = f"{error.one} and {error.other}"
        hint = "select rows by a mask over all of them, so that their number is known"
        captured.tell_recompile("sizes that an operator met", "are equal", was, file, int(line), hint)
        captured.assumptions.unpredictable.add(error.place)
        captured.forget(found[0])


def too_often(captured: Captured, place: str, program: Any) -> tuple[Segment, int] | None:
    """What was captured with these guards, and how often the data was otherwise at the place; None: seldom."""
    segment = next((s for s in captured.segments if s.guards.program is program), None)
    if segment is None:
        return None
    misses = captured.misses[place] = captured.misses.get(place, 0) + 1
    return None if captured.entry.hits - segment.hits_before >= RARE * misses else (segment, misses)
