"""``for i in range(0, x.shape[0], 256): x[i : i + 256]``: how many iterations there are is a guard, not the size."""

from __future__ import annotations

from moebius.interpreter import Frame

from ..values.numbers import is_open
from . import natives
from .number_sets import FEEDS
from .parts import Parts


def stepped(domain: Parts, args: list) -> range | None:
    """The range with the same items as ``range(*args)`` that ends where its last item does; None where it is of another
    kind, or may be asked for its end."""
    if len(args) != 3 or not is_open(args[1]) or type(args[0]) is not int or type(args[2]) is not int:
        return None
    (first, end, step), frame = args, domain.frame
    if abs(step) < 2 or frame is None or not is_only_iterated(frame):
        return None
    span = domain.binary("-", end, first) if step > 0 else domain.binary("-", first, end)
    count = domain.binary("//", domain.binary("+", span, abs(step) - 1), abs(step))
    return range(first, first + max(natives.specialised(count), 0) * step, step)


def is_only_iterated(frame: Frame) -> bool:
    """Whether what the frame's call of three arguments gives goes to a ``for`` statement, and nowhere else."""
    call, *following = frame.program.instructions[frame.pc : frame.pc + 4]
    names = [step.opname for step in following if step.opname not in FEEDS]
    return call.opname == "CALL" and call.arg == 3 and names[:1] == ["GET_ITER"]
