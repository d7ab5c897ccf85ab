"""The passes, in order, each held to its Contract."""

from __future__ import annotations

from moebius.lowering import dead_code, placement
from moebius.lowering.contract import Contract, Work
from moebius.lowering.draft import copy_graph
from moebius.lowering.errors import LoweringError
from moebius.lowering.experts import joining, rewrite
from moebius.lowering.graph import CapturedGraph, LoweringOptions
from moebius.lowering.memo import remembering
from moebius.lowering.step import asks_of_each, checkpoint, inference, observed

PASSES: tuple[Contract, ...] = (
    rewrite.CONTRACT,
    dead_code.CONTRACT,
    placement.CONTRACT,
    joining.CONTRACT,
    checkpoint.CONTRACT,
    inference.CONTRACT,
)

OUTLINES = (checkpoint.CONTRACT, inference.CONTRACT)  # what these put into a body has the users that it had
HOOKED = "a gradient hook or retain_grad() looks at a value that the loop's turns compute or use"
ASKED = "autograd.grad with create_graph or allow_unused asks what one operator for all experts has no answer to"


def run_passes(captured: CapturedGraph, options: LoweringOptions, passes: tuple[Contract, ...] = PASSES) -> Work:
    """A copy of the captured graph, after all passes, without code yet. The captured graph stays as it is.

    A gradient that somebody looks at halfway must go the way that it goes in the captured graph.
    """
    seen = observed(captured.gm)
    for why in (ASKED,) if asks_of_each(captured.gm) else (None, HOOKED):
        work, same = Work(copy_graph(captured.gm), captured, options, keep_loops=why), True
        with remembering():
            for contract in passes:
                contract.apply(work)
                if seen and contract not in OUTLINES:
                    now = observed(work.gm)
                    same = same and all(users == now.get(name) for name, users in seen.items())
        if same:
            break
    else:
        raise LoweringError("a pass took the users of a value whose gradient is looked at")
    return work
