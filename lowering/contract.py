"""What a pass needs and promises, in words and as a check on the graph.

Each pass file begins with its Contract. The pipeline runs ``promise`` after each pass and ``need`` before it, so that a
pass that breaks its word stops there, with its name, and not three passes later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from moebius.lowering.errors import ContractError
from moebius.lowering.graph import CapturedGraph, ExpertRegion, LoweringOptions

Check = Callable[[fx.GraphModule], "str | None"]


@dataclass
class Work:
    """What passes work on: the graph (theirs to change; capture's stays as it was), the options, the regions so far.

    loose: nodes that may have lost their last user. keep_loops: why no expert loop may be replaced, if so.
    known: operators (their tensors' metadata, options) whose values were worked out.
    """

    gm: fx.GraphModule
    captured: CapturedGraph
    options: LoweringOptions
    regions: list[ExpertRegion] = field(default_factory=list)
    loose: list[fx.Node] = field(default_factory=list)
    keep_loops: str | None = None
    known: set[Any] = field(default_factory=set)


@dataclass(frozen=True)
class Contract:
    """needs, promises: in words. need, promise: the same as checks, that say what is wrong, or None."""

    name: str
    needs: str
    promises: str
    need: Check
    promise: Check
    run: Callable[[Work], None]

    def apply(self, work: Work) -> None:
        """Run the pass between its two checks. Raises ContractError."""
        self.hold(self.need(work.gm), "needs", self.needs)
        self.run(work)
        self.hold(self.promise(work.gm), "promises", self.promises)

    def hold(self, fault: str | None, verb: str, words: str) -> None:
        if fault is not None:
            raise ContractError(
                f"pass {self.name!r} {verb}: {words}; but {fault}. This is a defect of moebius; please report it"
            )


def well_formed(gm: fx.GraphModule) -> str | None:
    """Whether the graph is one: nodes in order, no dangling arguments, and one output that is a tuple or list."""
    try:
        gm.graph.lint()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        return "the output is not a tuple"
    return None
