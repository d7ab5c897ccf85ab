"""Where in its storage an input begins: the rows of a batch, each a view of the data, are one capture.

No operator gives another result for it, and the graph runs on the real tensors. What asks for it is guarded, and so are
operators that fail at some of them.
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import GuardRecorder
from ..values.numbers import Number
from ..values.values import Break, TensorProxy
from .indices import holds_unknown_number, is_scalar_index

ASK = frozenset(("storage_offset", "view_as_complex", "is_set_to"))


class Offsets:
    """Of one trace. asked: whether something was answered or decided that an offset shows in. anywhere: whether a view
    was taken at a position that only the running step knows; its fake begins where that of the first position does."""

    asked = anywhere = False

    def look(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before an operator runs on fakes."""
        name = getattr(function, "__name__", "")
        as_other = name == "view" and any(is_kind(a, torch.dtype) for a in (*args, *kwargs.values()))
        if as_other or name in ASK:
            self.ask()

    def ask(self) -> None:
        """Something shows an offset."""
        self.asked = True
        if self.anywhere:
            detail = "where a view begins follows from a number that only the running step knows"
            raise Break("size that depends on values", detail, "ask for it outside of the step")

    def taken(self, key: Any) -> None:
        """Before a tensor is indexed."""
        keys = key if is_kind(key, tuple) else (key,)
        unknown = any(is_kind(k, Number) or is_scalar_index(k) for k in keys) or holds_unknown_number(key)
        self.anywhere = self.anywhere or unknown

    def guard(self, guards: GuardRecorder, inputs: list[TensorProxy]) -> None:
        """Each of the inputs begins where it does, if that was asked for."""
        for proxy in inputs if self.asked else ():
            real: Any = proxy.real
            if proxy.source is not None:
                meta = {"storage_offset": real.storage_offset()}
                guards.check("tensor", proxy.source, meta, text=f"begins at {real.storage_offset()} of its storage")
