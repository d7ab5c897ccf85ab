"""What capture hands down to lowering: graphs, expert loops, and what lowering says back about them.

These types live here, below capture, so that no import runs up. A captured graph is an ordinary torch-level
``torch.fx.GraphModule``; two functions give it what FX lacks: :func:`expert_loop`, the higher-order node that holds one
iteration of a Python loop over experts, and :func:`skip_iteration`, the ``continue`` of such a loop.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

# ----------------------------------------------------------------------------------------------------------------------
# The loop node
# ----------------------------------------------------------------------------------------------------------------------


class SkipTurn(Exception):
    """Ends one iteration of an expert loop early. Raised by :func:`skip_iteration`, caught by :func:`expert_loop`."""


def skip_iteration(condition: torch.Tensor | bool) -> None:
    """``if condition: continue`` inside the body of an :func:`expert_loop`.

    condition: a one-element tensor or a bool. Nodes before it in the body have run; nodes after it have not, and the
    carried values stay what they were at the start of the iteration.
    """
    if bool(condition):
        raise SkipTurn


def code_of(body: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's code alone: called as a module, it prints that code to stderr when one of its operators fails."""
    if not isinstance(body, fx.GraphModule):
        return body
    assert body.code  # made now: where it is not yet, ``forward`` makes it and calls the module
    return body.forward


def expert_loop(
    body: Callable[..., tuple], source: torch.Tensor | int, carried: Sequence[Any] = (), captures: Sequence[Any] = ()
) -> tuple:
    """Run ``body(row, *carried, *captures) -> new carried`` once for each row of ``source``, in order.

    This is the node's meaning, and how it runs when no lowering applies: a loop over the body graph.

    body: a GraphModule with placeholders (row, *carried, *captures) that returns a tuple as long as ``carried``.
        It may write in place into ``captures`` (``index_add_``), as the user's loop did.
    source: a tensor, iterated over its first axis as Python does (row has shape ``source.shape[1:]``), or an int n, for
        ``range(n)`` (row is a Python int).
    carried: values that each iteration replaces (``out = out + ...``); captures: values that every iteration reads.
    Returns the carried values after the last iteration (those given, if there was no iteration).
    """
    rows = range(source) if isinstance(source, int) else source
    state, run = tuple(carried), code_of(body)
    for row in rows:
        try:
            state = tuple(run(row, *state, *captures))
        except SkipTurn:
            continue
    return state


fx.wrap("expert_loop")
fx.wrap("skip_iteration")

# ----------------------------------------------------------------------------------------------------------------------
# What goes down, and what comes back
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class CapturedGraph:
    """One graph that capture extracted from a frame.

    gm: the torch-level FX graph. Placeholders are the inputs in call order and carry ``meta["source"]``, and plain
        tensors ``meta["memory"]``, those that overlapped when they were captured the same; every node carries
        ``meta["val"]`` (fake value) and ``meta["where"]`` = (file, line, function) of the user's innermost line.
    file, line: where the captured frame (or its part after a graph break) begins.
    fault: the error of ours because of which it runs as it was captured, if there was one.
    cold_seconds: wall time from the call's start until this graph could run; times: what of it went where.
    """

    gm: fx.GraphModule
    file: str
    line: int
    cold_seconds: float = 0.0
    name: str = "graph"
    fault: str | None = None
    times: dict[str, float] = field(default_factory=dict)

    def nodes(self) -> Iterator[fx.Node]:
        """The graph's nodes, those of the graphs in it (bodies of loops) included."""
        for module in self.gm.modules():
            if isinstance(module, fx.GraphModule):
                yield from module.graph.nodes

    @property
    def operations(self) -> int:
        """How many calls it makes (inputs, attributes and the output are none)."""
        return sum(node.op.startswith("call_") for node in self.nodes())

    @property
    def inputs(self) -> int:
        """How many inputs it takes."""
        graph = self.gm.graph
        return len(graph.find_nodes(op="placeholder"))


@dataclass(frozen=True)
class ProofStep:
    """A step of the proof that a region computes what the operator does: its name, what holds, and the user's line."""

    name: str
    holds: str
    file: str
    line: int


@dataclass
class ExpertRegion:
    """One place where the user's code runs tokens through experts, and what lowering did with it.

    idiom: how it was written, e.g. "for row in nonzero()", "range(num_experts)".
    top_k: how many experts a token goes to; None where the graph does not say that.
    lowered: True when one grouped experts operator replaced it; otherwise ``refusal`` says which step of the proof
        failed, at which line, and ``blocker`` is the place of what stands in the way, (file, line, function).
    kernel: name of the kernel form that runs it ("cpu", "triton", "loop", "cpu, expert parallel over 2 ranks", ...).
    saved_bytes: bytes kept for backward by this region, parameters excluded; None while unknown (dynamic sizes).
    proof: the steps that hold: all of them, or those before the one that the refusal names. as_written: says what the
    user's loop keeps for backward.
    """

    file: str
    line: int
    idiom: str
    num_experts: int | None = None
    top_k: int | None = None
    lowered: bool = False
    refusal: str | None = None
    kernel: str = "loop"
    saved_bytes: int | None = None
    blocker: tuple[str, int, str] | None = None
    proof: tuple[ProofStep, ...] = ()
    as_written: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def loop_saved_bytes(self) -> int | None:
        """The bytes that the loop keeps for backward as it is written, parameters excluded; None while unknown."""
        return None if self.as_written is None else self.as_written()


@dataclass
class LoweringOptions:
    """What the user asked of lowering: the options of ``capture`` that reach down here.

    whole_step: whether a foreign backend gets backward and what follows it too, as one graph.
    partial: the function of which the graph is a part that this rank's data chose; with a mesh, other ranks may run
    another part of it.
    precision, save: of every layer of experts, as ``moebius.kernels.experts`` takes them.
    """

    backend: str | Callable = "moebius"
    mesh: Any = None
    plan: Any = "auto"
    precision: Any = None
    save: str = "default"
    whole_step: bool = False
    partial: str = ""


class LayerCall:
    """Stands in a graph for the nodes of a layer, and runs their graph.

    isolated: it writes into nothing that it is given. fresh: its results are new tensors, each with a storage of its
    own. forward: the body's code, once it is made.
    """

    def __init__(self, body: fx.GraphModule, isolated: bool = False, fresh: bool = False):
        self.body, self.isolated, self.fresh = body, isolated, fresh
        self.forward: Callable[..., tuple] | None = None
        self.__name__ = self.__qualname__ = "equal_layers"  # what fx calls it in code

    def __call__(self, *inputs: Any) -> tuple:
        assert self.forward is not None
        return self.forward(*inputs)


@dataclass
class Lowered:
    """A graph made ready to run.

    fn: callable(*inputs) -> tuple of outputs, inputs and outputs as the captured graph has them. made: the graph after
    lowering's passes (before a foreign backend compiled it); None where it is written out of ``repeats`` when somebody
    asks for it. repeats: the code that runs it (``repeats.Repeats``), where that is not the graph's own. fault: why it
    is as it was captured, where a pass failed.
    """

    fn: Callable[..., tuple]
    made: fx.GraphModule | None
    regions: list[ExpertRegion] = field(default_factory=list)
    repeats: Any = None
    fault: Exception | None = None

    @property
    def gm(self) -> fx.GraphModule:
        """The graph after lowering's passes."""
        return self.repeats.written().gm if self.made is None else self.made

    @property
    def modules(self) -> list[fx.GraphModule]:
        """Those of lowering that have code of their own."""
        return self.repeats.modules if self.repeats is not None else [self.gm]
