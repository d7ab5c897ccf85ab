"""Sizes that vary and that an instruction needs the value of: that is a constant there, as long as few have come.

A last batch is short, images come in two forms: each has its capture. Where more come than it pays to capture for, the
instruction is a graph break, which serves all. Numbers that are no sizes count something, most often: no two are alike.
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts.torch_fakes import today
from .parts import Parts

FEW = 6  # sizes that an instruction has its captures for
Site = tuple[Any, int]  # code, and index of the instruction


class FewSizes:
    """Those of one attempt. met: the sizes that were constants, by instruction, in the attempts before."""

    def __init__(self, domain: Parts):
        self.domain, self.met = domain, set[tuple[Site, int]]()

    def takes(self, site: Site, size: int) -> bool:
        """Whether a size may be a constant there."""
        self.met.add((site, size))
        return sum(one == site for one, _ in self.met) <= FEW

    def constant(self, value: Any) -> Any:
        """The value, or its number in this call under a guard."""
        frame, domain = self.domain.frame, self.domain
        found = domain.numbers.formula_of_size(value) if type(value) is torch.SymInt and frame is not None else None
        if found is None or frame is None:
            return value
        tensors = {p.source for p in domain.tensors.inputs if is_kind(p.real, torch.Tensor)}
        if not tensors.issuperset(found[1]) or not self.takes((frame.code, frame.pc), today(value)):
            return value
        return int(value)

    def constants(self, value: Any) -> Any:
        """The same of an argument, or of what is in a tuple."""
        kind: Any = type(value)
        return kind(map(self.constants, value)) if kind in (tuple, torch.Size) else self.constant(value)
