"""Functions that keep their answers (``functools.lru_cache``), or choose by them (``singledispatch``): asked while
tracing, natively, and by a guard at each call."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..bytecode.reported import counted
from ..guards.sources import Static
from ..heap.heap import ANYTHING, Event
from ..heap.identities import has_own_hash
from ..torch_facts import random_state, torch_private
from ..values.values import SYMBOLIC, Break, TensorProxy, proxies_in
from . import natives
from .own_hashes import follows, is_key
from .parts import CallParts
from .reach import may_look_at

OF_SIZES = frozenset({"einops.einops"})  # modules whose caches keep nothing but what follows from sizes
BY_ARGUMENTS = frozenset({"typing"})  # those that give an equal object whenever a full cache has let one go


class CachedFunctions(CallParts):
    """What a call of one does."""

    looked_at: dict[tuple, tuple[Any, int, list[Event]]]  # by function and arguments: when, and what it read then

    def cached(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``functools.lru_cache``: what the cache gives, or the function's first answer, which it keeps."""
        leaves = torch_private.tree_leaves((args, kwargs))
        if function.__module__ in OF_SIZES and any(is_kind(a, SYMBOLIC) for a in leaves):
            inner = function.__wrapped__
            return self.call(self.objects.enter(inner, Static(name_of(inner), inner)), args, kwargs)
        sizes = self.sizes
        args, kwargs = [*map(sizes.constants, args)], {name: sizes.constants(a) for name, a in kwargs.items()}
        if not all(map(self.is_asked_with, (*args, *kwargs.values()))):
            raise Break(
                "cached function",
                f"{name_of(function)} is called with arguments that are not plain",
                "call it outside of the step",
            )
        in_loop = self.tensors.writer.in_loop  # (or in a branch, which may not run)
        if in_loop or self.heap.outside or self.are_written(self.tensors.inputs):
            inner, types_of = function.__wrapped__, tuple(map(type, leaves))
            self.refuse_to_look_back(inner, args, kwargs, in_loop, (id(inner), types_of, *args, *kwargs.items()))
        if function.__module__ in BY_ARGUMENTS:
            return self.objects.enter(found := function(*args, **kwargs), Static(name_of(function), found))
        return self.from_cache(functools.partial(called, function, tuple(args), kwargs), name_of(function))

    def is_asked_with(self, value: Any) -> bool:
        """Whether a cache may be asked with the object, as its class hashes and compares it, or with such ones."""
        if natives.is_plain(value, self.known):
            return True
        if type(value) is tuple:
            return all(map(self.is_asked_with, value))
        return is_key(self.domain, value) and (not has_own_hash(value) or follows(self.domain, value, None))

    def refuse_to_look_back(self, inner: Any, args: list, kwargs: dict[str, Any], in_loop: bool, key: tuple) -> None:
        """The step has changed something, which a function that runs natively sees as it was: a graph break if a
        cached function looks at that. It is interpreted once to find out, and again for the same arguments (key) where
        something that it read has been written since."""
        heap, counter = self.heap, self.domain.counter
        begin, followed = heap.mark(), True
        if before := self.looked_at.get(key):
            _, since, older = before
            if self.still_looks(older, since, True):
                heap.read("looked", older, since, True)
                return
        counts = counter.mark()
        heap.listening += 1
        try:
            self.call(self.objects.enter(inner, Static(name_of(inner), inner)), args, kwargs)
        except Break:  # what it reads cannot be told: most often it asks the system, and no tensors
            followed = False
        finally:
            heap.listening -= 1
            counter.back_to(counts)
        reads = [event for event in heap.reads(begin) if heap.age(event[1]) < begin]
        older = [event for event in reads if event[1] is not ANYTHING]
        known = followed and len(older) == len(reads)
        changed = any(heap.age(event[1]) >= 0 or heap.was_written(event, 0, begin) for event in older)
        doubtful = not followed and in_loop or not (known or changed) and self.may_meet(inner, begin)
        if doubtful or changed or heap.changes_older(begin) or self.meets_written(older):
            detail = f"{name_of(inner)} depends on what the step changed, or changes something"
            raise Break("cached function", detail, "call it before the step changes that")
        if known:
            self.looked_at[key] = inner, begin, older
            heap.read("looked", older, begin, True)

    def still_looks(self, older: list[Event], since: int, then: bool) -> bool:
        """Whether nothing has been written since to what a cached function was seen to look at, which is read again."""
        unchanged = not any(self.heap.was_written(event, since) for event in older) and not self.meets_written(older)
        self.heap.events += older if unchanged else ()
        return unchanged

    def may_meet(self, inner: Any, begin: int) -> bool:
        """Whether a function that was not followed to its end may look at what was written before a mark."""
        before_it = self.heap.writes_between(0, begin)
        written = [owner for _, owner, _, born in before_it if born < 0 and not is_kind(owner, TensorProxy)]
        whose = [record.obj for owner in written if (record := self.objects.owner_of(owner)) is not None]
        return may_look_at(inner, [*written, *whose])

    def meets_written(self, reads: list[Event]) -> bool:
        """Whether a tensor that was read is one that the step has written to, under any name."""
        met = proxies_in([event[3] for event in reads])
        replaced = [("data", proxy, "data", None) for proxy in met]
        return any(map(self.heap.was_written, replaced)) or self.are_written(met)

    def are_written(self, met: Iterable[TensorProxy]) -> bool:
        """Whether the step has written to one of these tensors in place, under any name: ``p.data`` is one."""
        fakes = (p.fake for p in met if is_kind(p.fake, torch.Tensor))
        return any(map(self.tensors.world.writes_into, fakes))

    def from_cache(self, ask: functools.partial, name: str) -> Any:
        with counted():  # (the answers of a cache are kept when the call runs: it computes them once)
            value = random_state.drawing(ask)
        if self.objects.is_new(value):
            raise Break("cached function", f"{name} gives back what the step made", "call it outside of the step")
        self.heap.read("answer", ask, None, value)
        self.guards.answers(f"{name}()", "gives what it gave", (ask, value))
        return self.objects.enter(value, Static(f"{name}()", value))

    def dispatched(self, dispatch: types.FunctionType, cls: Any) -> Any:
        """``functools.singledispatch``'s choice of a function for a class: asked natively, as its cache knows classes
        by weak references, and by a guard at each call."""
        cell: Any = dict(zip(dispatch.__code__.co_freevars, dispatch.__closure__ or (), strict=True))["registry"]
        registry = cell.cell_contents
        if self.objects.is_new(dispatch):
            raise Break("functools.singledispatch", "made in the step", "make it outside of the step")
        record = self.objects.record_of(registry)
        if record is not None and record.changed:
            raise Break("functools.singledispatch", "after the step registered a function", "register before the step")
        self.heap.read("registry", registry, None, None)
        chosen = dispatch(cls)
        name = getattr(chosen, "__qualname__", "function")
        ask = functools.partial(dispatch, cls)
        self.heap.read("answer", ask, None, chosen)
        self.guards.answers(name, f"is chosen for {cls.__qualname__}", (ask, chosen))
        return self.objects.enter(chosen, Static(name, chosen))


def called(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """With a tuple of its own: a cache may find one again that it has, though what is in it has another hash now."""
    return function(*list(args), **kwargs)


def name_of(function: Any) -> str:
    """What a function is called, and a partial or an object that is called by its class."""
    return getattr(function, "__qualname__", type(function).__qualname__)
