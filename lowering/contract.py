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
    by_rows: whether experts may become projections of sorted rows, as all else was tried. (These are not placed on
    ranks.) known: values of operators that were worked out, by their tensors' metadata and options. held: checks that
    hold, as no pass has run since.
    """

    gm: fx.GraphModule
    captured: CapturedGraph
    options: LoweringOptions
    regions: list[ExpertRegion] = field(default_factory=list)
    loose: list[fx.Node] = field(default_factory=list)
    keep_loops: str | None = None
    by_rows: bool = False
    known: dict[Any, Any] = field(default_factory=dict)
    held: set[Check] = field(default_factory=set)


@dataclass(frozen=True)
class Contract:
    """needs, promises: in words. need, promise: the same as checks, that say what is wrong, or None. wanted: whether
    there is anything for the pass to do."""

    name: str
    needs: str
    promises: str
    run: Callable[[Work], None]
    need: tuple[Check, ...] = field(default_factory=lambda: (well_formed,))
    promise: tuple[Check, ...] = field(default_factory=lambda: (well_formed,))
    wanted: Callable[[Work], bool] = lambda work: True

    def apply(self, work: Work) -> None:
        """Run the pass between its two checks. Raises ContractError."""
        for check in self.need:
            if check not in work.held:
                self.hold(check(work.gm), "needs", self.needs)
        if not self.wanted(work):
            return
        work.held.clear()
        self.run(work)
        for check in self.promise:
            self.hold(check(work.gm), "promises", self.promises)
        work.held.update(self.promise)

    def hold(self, fault: str | None, verb: str, words: str) -> None:
        if fault is not None:
            raise ContractError(
                f"pass {self.name!r} {verb}: {words}; but {fault}. This is a defect of moebius; please report it"
            )


def well_formed(gm: fx.GraphModule) -> str | None:
    """Whether the graph is one: nodes in order, no dangling arguments, and one output that is a tuple or list."""
    if not is_in_order(gm):
        try:
            gm.graph.lint()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        return "the output is not a tuple"
    return None


def is_in_order(gm: fx.GraphModule) -> bool:
    """What ``Graph.lint`` finds out, at a fifth of its time; it is asked where this says no, and names the node."""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in gm.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        if node.op in ("get_attr", "call_module"):
            found: Any = gm
            for part in str(node.target).split("."):
                found = getattr(found, part, None)
            if found is None:
                return False
        seen.add(node)
        names.add(node.name)
    return len(names) == len(seen)
