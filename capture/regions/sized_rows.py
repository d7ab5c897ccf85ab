"""``for row in x`` where x has as many rows as an input says: one node, which serves every size, or as many iterations.

What one node cannot say (a list that grows, a number of Python's that is carried) is unrolled, as ``range(len(x))`` is,
and the size is guarded. Where more sizes come than it pays to capture for, the loop is a graph break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from moebius.interpreter import is_kind

from ..python.few_sizes import Site
from ..torch_facts import torch_private
from ..torch_facts.torch_fakes import today
from ..values.rows import TensorRows
from ..values.values import Break, TensorProxy

MANY = 128  # rows of which that would be a long capture


class SizedRows:
    """Those of one attempt. unrolled: where attempts before have met what one node cannot say."""

    def __init__(self, domain: Any):
        self.domain, self.refused = domain, set[Site]()
        self.unrolled = set[Site]()

    def rows(self, proxy: TensorProxy) -> TensorRows | None:
        """What iterates over a tensor whose length is a symbol; None where it is taken as it is in this call."""
        domain, frame, length = self.domain, self.domain.frame, proxy.fake.shape[0]
        if frame is None or torch_private.depends_on_values(length):
            return TensorRows(proxy)
        site, rows = (frame.code, frame.pc), today(length)
        if site in self.unrolled and rows <= MANY and domain.sizes.takes(site, rows):
            return None
        return TensorRows(proxy, site=site)

    def refuse(self, rows: Any, detail: str) -> NoReturn:
        """They are asked for by what is no loop of a frame's."""
        if is_kind(rows, TensorRows):
            self.refused |= {rows.site} - {None}
        raise Break("iterating over a tensor of unknown length", detail, "iterate over it with a for loop")

    def met(self, loops: Sequence[Any]) -> set[Site]:
        """Where the trace has asked for those that a break has to do with. loops: those that it is in."""
        rows = [loop.rows for loop in loops if is_kind(loop.rows, TensorRows)]
        return self.refused | {one.site for one in rows if one.site is not None}
