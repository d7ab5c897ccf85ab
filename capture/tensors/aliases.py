"""Which inputs of a graph are one tensor, and which are two.

Of a batch that is drawn anew in each call, two items may be one tensor today and two tomorrow. A graph that takes each
in a place of its own is right for both, unless the step can tell: it writes into the memory of one, takes its gradient,
sets an attribute of it, or asks which object it is. That is decided at the end of a trace, from what was asked.

To begin with, two places that lead to one tensor are one input, and tensors that are two stay two: both are guards.
Once such a guard has failed, its places are inputs of their own (``apart``), and a pair has a guard only if the step
can tell one of the two (``guard``). Where it can, and today they are one tensor, they are one input again
(``together``).
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.hints import is_gradient
from ..guards.recorder import GuardRecorder
from ..guards.sources import Source, family, is_same_place
from ..heap.heap import Heap
from ..torch_facts import torch_private
from ..torch_facts.spans import PLAIN
from ..torch_facts.torch_fakes import FakeWorld
from ..values.values import Break, TensorProxy
from .overlaps import guard_overlaps

FEW_PAIRS = 16  # more of them are one guard, which says a little too much


class Aliases:
    """Of one trace. apart, together: kinds of places (``family``), as earlier captures and attempts taught."""

    def __init__(self, guards: GuardRecorder, world: FakeWorld) -> None:
        self.guards, self.world, self.heap = guards, world, Heap()
        self.apart: set[str] = set()
        self.together: set[str] = set()
        self.begun: list[tuple[TensorProxy, float]] = []  # with how often each had been written into by then
        self.met: dict[int, list[TensorProxy]] = {}  # by id of the real tensor: its inputs, most often one
        self.bases: set[int] = set()  # by id: of which tensors inputs are views
        self.switched: set[int] = set()  # by id: inputs of which the step sets whether they require gradients

    def met_first(self, proxy: TensorProxy) -> None:
        """A new input."""
        if is_kind(proxy.real, torch.Tensor):
            self.begun.append((proxy, self.world.writes_into(proxy.fake)))
            self.met.setdefault(id(proxy.real), []).append(proxy)
            if (base := base_of(proxy.real)) is not None:
                self.bases.add(id(base))

    def switch(self, proxy: TensorProxy) -> None:
        """The step sets whether an input requires gradients: what is a view of it shows that flag, too."""
        if id(proxy.real) in self.bases:
            raise of_a_view()
        if proxy.source is not None:
            self.switched.add(id(proxy.real))

    def known(self, real: torch.Tensor, source: Source) -> TensorProxy | None:
        """The input that a place leads to, if there is one that may stand for it: that it does is a guard."""
        found = self.met.get(id(real))
        if found is None:
            if self.switched and id(base_of(real)) in self.switched:
                raise of_a_view()
            return None
        for proxy in found:
            if proxy.source is not None and is_same_place(proxy.source, source):
                return proxy
        if self.may_part(real, source) or all(self.may_part(real, proxy.source) for proxy in found):
            return None
        self.same(found[0], source)
        return found[0]

    def may_part(self, real: torch.Tensor, source: Source | None) -> bool:
        place = "" if source is None else family(source.name)
        return place in self.apart and place not in self.together and type(real) in PLAIN and not real.requires_grad

    def same(self, known: TensorProxy, source: Source) -> None:
        guards = self.guards
        assert known.source is not None
        if source.static and known.source.static:
            return
        if known.source.static:
            guards.check("is", source, known.real, text=f"is the same as {known.source.name}")
        elif source.static:
            guards.check("is", known.source, known.real, text=f"is the same as {source.name}")
        else:
            guards.same_or_distinct("same", source, known.source)

    # ------------------------------------------------------------------------------------------------------------------
    # At the end of a trace
    # ------------------------------------------------------------------------------------------------------------------

    def written(self) -> list[TensorProxy]:
        """Inputs that the step has written into."""
        return [p for p, before in self.begun if self.world.writes_into(p.fake) != before]  # (NaN: nobody counts)

    def can_tell(self) -> set[int]:
        """Inputs, by id, that the step could tell from others if they were one tensor, or two."""
        written = self.written()
        memory = {torch_private.storage_of(p.real) for p in written if type(p.real) in PLAIN and p.real is not None}
        known = {id(p) for p in written} | self.heap.written.keys()
        return {
            id(p)
            for p, _ in self.begun
            if id(p) in known or p.is_asked or p.attributes or p.required or p.fake.requires_grad
            or type(p.real) not in PLAIN or (p.real is not None and torch_private.storage_of(p.real) in memory)
        }  # fmt: skip

    def mistaken(self) -> set[str]:
        """Places that were two inputs while they held one tensor, where the step can tell: they are to be one."""
        parted = [found for found in self.met.values() if len(found) > 1]
        told = self.can_tell() if parted else set()
        pairs = [found for found in parted if any(id(p) in told for p in found)]
        return {family(p.source.name) for found in pairs for p in found if p.source is not None} - self.together

    def guard(self) -> None:
        """Inputs that are two tensors stay two; where two have once been one, only those that the step can tell."""
        told = self.can_tell() if self.apart else {id(p) for p, _ in self.begun}
        kinds: dict[Any, list[TensorProxy]] = {}
        for proxy, _ in self.begun:
            kinds.setdefault(kind_of(proxy.real) if self.apart else (), []).append(proxy)
        for alike in kinds.values():
            inputs = [p for p in alike if p.source is not None and not p.source.static]
            fixed = [p for p in alike if p.source is not None and p.source.static]
            seen, others = [p for p in inputs if id(p) in told], [p for p in inputs if id(p) not in told]
            if len(seen) * len(others) > FEW_PAIRS:
                self.all_distinct(inputs)
            else:
                self.all_distinct(seen)
                for other in others if seen else ():
                    self.all_distinct([*seen, other])
            self.none_of(seen, fixed)
            self.none_of(others, [p for p in fixed if id(p) in told])
        changed = self.written() or self.switched
        if changed or any(is_gradient(p.source) for p, _ in self.begun):  # (backward adds to those in place)
            guard_overlaps(self.guards, [p for p, _ in self.begun])

    def all_distinct(self, inputs: list[TensorProxy]) -> None:
        sources = [p.source for p in inputs if p.source is not None]
        if len(sources) > 1:
            self.guards.all_distinct(sources, "tensors", len(sources))

    def none_of(self, inputs: list[TensorProxy], fixed: list[TensorProxy]) -> None:
        held = tuple(p.real for p in fixed)
        for proxy in inputs if held else ():
            assert proxy.source is not None
            self.guards.check("none_of", proxy.source, held, text="is none of the static tensors")


def base_of(real: Any) -> torch.Tensor | None:
    return real._base if type(real) in PLAIN else None


def of_a_view() -> Break:
    """A fake knows nothing of the input that it is a view of."""
    return Break("Tensor.requires_grad_", "another tensor of the step is a view of this one", "call it outside")


def kind_of(real: Any) -> tuple[Any, ...]:
    """What a guard on each input compares anyway: where it differs, two inputs are two tensors."""
    if type(real) not in PLAIN:
        return ()
    return real.dtype, real.device, real.dim(), real.requires_grad
