"""What earlier calls and attempts taught a trace: how to take what can be taken in several ways."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from moebius.interpreter import is_kind
from moebius.lowering import OWN

from ..guards.sources import OpenPlaces, family
from ..options import Options
from ..regions.conditional_lists import Lists
from ..regions.loops import Loops
from ..tensors.bounds import Bounds
from ..torch_facts import torch_private
from .blockers import Stop

# Why backward runs between two graphs, and what to do.
FOREIGN = (
    "for a foreign backend backward runs between two graphs",
    "use backend='moebius' or 'eager' for one graph of the whole step",
)
LEFT_OUT = (
    "a batch left parameters without a gradient, so backward runs between two graphs since then",
    "ask for gradients with torch's optimizers and clip_grad_norm_ alone, which pass over what has none",
)

# Graph breaks that a size may be the reason of.
OF_SIZES = ("operator without a fake", "data-dependent operator", "data-dependent branch", "exception")


class Met(Protocol):
    """What a trace met (``domain.TrackingDomain``)."""

    lists: Lists
    bounds: Bounds
    loops: Loops


@dataclass
class Assumptions:
    """What earlier calls of the same code taught: places and sizes that differ from call to call.

    symbolic_places: names of places that hold another number each call. counters: those that the step itself writes.
    small: numbers, in words, that were 0 or 1 where this attempt wanted sizes, and are constants there.
    symbolic_strings: names of places that hold another text each call. inspected_strings: those where the step looks
    into the text.
    varying: places whose value decides and is another one in each call: what was met there, in words, and a hint.
    logs: lists to which a capture was seen to append: their lengths and last items are no constants.
    thin: axes, by kind of place, whose size is 1 in some calls and more in others. thick: kinds of places where the
    step cannot be captured for both at once.
    apart: kinds of places that hold one tensor in some calls and two in others, each an input of its own for that.
    together: those of them where the step can tell (``Aliases``).
    below: the same, of functions that will be captured below, by the names that the places have there.
    whole_step: whether backward and numbers read from tensors may be in the graph (our own backends run them).
    outside: why they may not, and what to do about it.
    compiling_for: file and name of the functions to which ``is_compiling()`` answers True.
    deciding: places of numbers on which a branch went another way in a later call.
    unrolled: loops over ranges, branches, max() and min(), that cannot be recorded as one node, or of whose result more
    is asked (``Bound``, ``Either``); lengths: sizes that were constants (``FewSizes``); blockers: the graph break that
    says why, for those in which it stands; split: the
    same for loops over hits in which a graph ends. by_number, not_by_number: loops over hits that are taken as one
    iteration for each expert, and those that this does not help.
    options: what the callable was captured with.
    gathered, not_gathered: lists to which branches on values append, and those of them that must be Python's own.
    casts: the autocast that a backward ran under, beside what is looked at anyway (``functions.backward_graph``).
    natively: autograd functions and checkpointed calls that are not captured, as the step changes what backward reads
        (and what a step reads, its continuation may change).
    continues: whether it is what follows a graph break: numpy code in a row belongs to that (``codegen.stretches``).
    follows_data: whether the break, or one before it, asked for the value of a tensor.
    strict: checkpointed calls that may change nothing older, as backward, which runs them again, is not in the trace.
    inference_breaks: whether inference mode in the step is a graph break, as it could not be left in the graph.
    each_module: whether modules like one before are interpreted all the same, as a gradient goes through them.
    holds_live: whether what Python goes on with where a batch leaves out a gradient lives until that is known.
    speculates: whether a branch on data may be in the graph, with a side exit. predictions: the way that each goes
    (``speculation.SideExit.place``). unpredictable: branches that went both ways too often.
    """

    symbolic_places: set[str] = field(default_factory=set)
    dynamic_dims: dict[str, set[int]] = field(default_factory=dict)
    dynamic: bool | None = None
    counters: set[str] = field(default_factory=set)
    small: set[str] = field(default_factory=set)
    symbolic_strings: set[str] = field(default_factory=set)
    inspected_strings: set[str] = field(default_factory=set)
    varying: dict[str, tuple[str, str]] = field(default_factory=dict)
    logs: set[str] = field(default_factory=set)
    thin: dict[str, set[int]] = field(default_factory=dict)
    thick: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    together: set[str] = field(default_factory=set)
    below: dict[types.CodeType, dict[str, tuple[str, str]]] = field(default_factory=dict)
    whole_step: bool = True
    outside: tuple[str, str] = FOREIGN
    compiling_for: frozenset[tuple[str, str]] = frozenset()
    deciding: set[str] = field(default_factory=set)
    unrolled: set[tuple[types.CodeType, int]] = field(default_factory=set)
    lengths: set[tuple[tuple[types.CodeType, int], int]] = field(default_factory=set)
    blockers: dict[tuple[types.CodeType, int], Stop] = field(default_factory=dict)
    split: dict[tuple[types.CodeType, int], Stop] = field(default_factory=dict)
    gathered: set[tuple[types.CodeType, int]] = field(default_factory=set)
    not_gathered: set[tuple[types.CodeType, int]] = field(default_factory=set)
    by_number: set[tuple[types.CodeType, int]] = field(default_factory=set)
    not_by_number: set[tuple[types.CodeType, int]] = field(default_factory=set)
    options: Options | None = None
    speculates: bool = False
    casts: list[Any] = field(default_factory=list)
    natively: set[str] = field(default_factory=set)
    continues: bool = False
    strict: set[str] = field(default_factory=set)
    inference_breaks: bool = False
    each_module: bool = False
    holds_live: bool = False
    predictions: dict[str, bool] = field(default_factory=dict)
    unpredictable: set[str] = field(default_factory=set)
    marked: Callable[[torch.Tensor], frozenset[int]] | None = None
    follows_data: bool = False

    def of_code(self, code: types.CodeType) -> dict[str, tuple[str, str]]:
        """What varies in the calls of a function that will be captured below."""
        return self.below.setdefault(code, {})

    @property
    def recomputes(self) -> bool:
        """Whether checkpointed calls may be in the graph: our own backends run them, on a mesh too."""
        return self.whole_step or (self.on_a_mesh and self.runs_here)

    @property
    def on_a_mesh(self) -> bool:
        """Whether other ranks run the same program, on other data: each has to break where the others do, whatever
        the size of its own batch says of a branch on data."""
        return self.options is not None and self.options.mesh is not None

    @property
    def branches(self) -> bool:
        """Whether branches on data may be in the graph, outside of loops over experts, which run on each rank: with a
        mesh a rank whose batch leaves out what others do would miss their exchange."""
        return self.whole_step and not self.on_a_mesh

    @property
    def takes_ones(self) -> bool:
        """Whether sizes that vary are 1 as well."""
        return self.runs_here and not self.thin.keys() <= self.thick

    @property
    def runs_here(self) -> bool:
        """Whether our own backends run the graph."""
        return self.options is None or self.options.backend in OWN

    def copied(self) -> Assumptions:
        """As it is now, whatever is learnt later."""
        made = replace(self, dynamic_dims=apart(self.dynamic_dims), thin=apart(self.thin))
        for name, held in vars(self).items():
            if is_kind(held, set | dict | list) and name not in ("dynamic_dims", "thin"):
                setattr(made, name, type(held)(held))
        return made

    def learn_with(self, other: Assumptions) -> None:
        """What the code of the other's was taught is known to this one as well, and the other way round: the
        continuations of a frame that a loop goes on in, iteration by iteration."""
        self.symbolic_places, self.dynamic_dims = other.symbolic_places, other.dynamic_dims
        self.symbolic_strings, self.inspected_strings = other.symbolic_strings, other.inspected_strings
        self.varying, self.apart, self.together = other.varying, other.apart, other.together
        self.thin, self.thick = other.thin, other.thick
        self.logs = other.logs

    def learn_from(self, above: Assumptions, code: types.CodeType) -> None:
        """What is known of places that vary, and of branches on data, in the function that calls this one, or that this
        continues. (A place has one name on both sides: see ``continuations.cell_places``.)"""
        self.varying |= above.varying | above.below.get(code, {})
        self.symbolic_places |= above.symbolic_places
        self.counters |= above.counters
        self.apart |= above.apart
        self.thin, self.thick = above.thin, above.thick
        self.logs |= above.logs
        self.together |= above.together
        self.split |= above.split
        self.deciding |= above.deciding
        self.below, self.unpredictable = above.below, above.unpredictable

    def go_on(self, varying: set[str], on_data: bool) -> None:
        """What is known of a continuation as it is made. varying: places with numbers that the graph has computed."""
        self.symbolic_places |= varying
        self.follows_data = on_data

    def amount(self) -> int:
        """How much is known: it is more after anything was learnt."""
        axes = (*self.dynamic_dims.values(), *self.thin.values())
        return sum(len(held) for held in (*vars(self).values(), *axes) if is_kind(held, set | dict))

    def open_places(self) -> OpenPlaces:
        """Places of numbers and texts that are no constants."""
        return OpenPlaces(self.symbolic_places | self.counters | self.open_strings() | self.varying.keys())

    def open_strings(self) -> set[str]:
        """Places of texts that are inputs of the graph."""
        return (self.symbolic_strings - self.inspected_strings) | (self.symbolic_strings & self.varying.keys())

    def forget(self) -> None:
        """What earlier calls have taught of places, sizes and branches."""
        every: tuple[set[str] | dict[Any, Any], ...] = (
            self.deciding, self.symbolic_places, self.symbolic_strings, self.inspected_strings, self.unpredictable,
            self.apart, self.together, self.logs,
            self.varying, self.below, self.dynamic_dims, self.thin, self.predictions,
        )  # fmt: skip
        for known in every:
            known.clear()

    def learn_of_break(self, reason: str, domain: Met, endless: set[str], ones: set[str]) -> bool:
        """Whether a trace that broke has shown a list to be one that branches append to, or not to be one, what
        max() or a branch gave to be more than a number, or a branch of which nobody knows how often it will go one way.
        Else it may have broken for its inputs of one row (ones), which were taken for any number."""
        lists, bounds = domain.lists, domain.bounds
        before = len(self.gathered), len(self.not_gathered), len(self.unrolled), len(self.unpredictable)
        self.unrolled |= bounds.refused | domain.loops.sized.met(domain.loops.open)
        self.not_gathered |= lists.refused & self.gathered
        self.gathered |= lists.wanted
        self.unpredictable |= endless
        after = len(self.gathered), len(self.not_gathered), len(self.unrolled), len(self.unpredictable)
        if before != after:
            return True
        found = {family(name) for name in ones} - self.thick if reason in OF_SIZES else set()
        self.thick |= found
        return bool(found)

    def dims(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The axes of an input that get a symbolic size. Size 0 is never symbolic, 1 only where that is worth it: torch
        treats them apart."""
        chosen = set(self.dynamic_dims.get(name, ()))
        if self.dynamic:
            chosen = set(range(tensor.dim()))
        if self.marked is not None:
            chosen |= self.marked(tensor)
        if self.dynamic is False:
            chosen = set()
        chosen |= torch_private.dims_by_rank(tensor)
        sizes = torch_private.of_one_rank(tensor).shape
        ones = self.thin.get(family(name), set()) if self.takes_ones and family(name) not in self.thick else set()
        return tuple(d for d in sorted(chosen) if d < tensor.dim() and sizes[d] > (0 if d in ones else 1))


def apart(axes: dict[str, set[int]]) -> dict[str, set[int]]:
    """A copy that is told nothing any more."""
    return {place: set(found) for place, found in axes.items()}
