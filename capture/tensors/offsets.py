"""Where in its storage an input begins: the rows of a batch, each a view of the data, are one capture.

No operator gives another result for it, and the graph runs on the real tensors. What asks for it is guarded, and so are
operators that fail at some of them.
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import GuardRecorder
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import Break, TensorProxy
from .indices import holds_unknown_number, is_scalar_index

ASK = frozenset(("storage_offset", "view_as_complex", "is_set_to"))


class Offsets:
    """Of one trace, by the memory that tensors lie in. asked: where something was answered or decided that an offset
    shows in. anywhere: where a view was taken at a position that only the running step knows; its fake begins where
    that of the first position does."""

    def __init__(self) -> None:
        self.asked, self.anywhere = set[int | None](), set[int | None]()

    def look(self, function: Any, args: tuple, kwargs: dict[str, Any], inner: bool) -> None:
        """Before an operator runs on fakes. inner: in the body of a region, whose operands have memory of their own."""
        name = getattr(function, "__name__", "")
        given = (*args, *kwargs.values())
        as_other = name == "view" and any(is_kind(a, torch.dtype) for a in given)
        if as_other or name in ASK:
            self.ask(given, inner)

    def ask(self, given: tuple, inner: bool) -> None:
        """Something shows the offsets of these."""
        tensors = () if inner else [value for value in given if is_kind(value, TensorProxy)]
        asked: set[int | None] = {None} if inner else set(map(memory_of, tensors))
        self.asked |= asked
        if meet(asked, self.anywhere):
            detail = "where a view begins follows from a number that only the running step knows"
            raise Break("size that depends on values", detail, "ask for it outside of the step")

    def taken(self, proxy: TensorProxy, key: Any, inner: bool, moved: bool) -> None:
        """Before a tensor is indexed. moved: its fake begins elsewhere than where the index says."""
        keys = key if is_kind(key, tuple) else (key,)
        if moved or any(is_kind(k, Number) or is_scalar_index(k) for k in keys) or holds_unknown_number(key):
            self.anywhere.add(None if inner else memory_of(proxy))

    def guard(self, guards: GuardRecorder, inputs: list[TensorProxy]) -> None:
        """Each of the inputs begins where it does, if that was asked for."""
        for proxy in inputs if self.asked else ():
            real: Any = proxy.real
            if proxy.source is not None and meet(self.asked, {memory_of(proxy)}):
                meta = {"storage_offset": real.storage_offset()}
                guards.check("tensor", proxy.source, meta, text=f"begins at {real.storage_offset()} of its storage")


def memory_of(proxy: TensorProxy) -> int | None:
    """The storage of its fake; None where it may be any."""
    fake = proxy.fake
    return torch_private.storage_of(fake) if torch_private.is_fake(fake) else None


def meet(some: set[int | None], others: set[int | None]) -> bool:
    return bool(some and others) and (None in some or None in others or not some.isdisjoint(others))
