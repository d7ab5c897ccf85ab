"""Which inputs of a graph have memory in common: a view that was made before the call, parameters cut of one buffer.

Lowering moves what reads an input past what writes into another one, where the two lay apart when the step was
captured. So a step that writes into an input holds for calls in which the same inputs overlap.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from ..guards.recorder import GuardRecorder
from ..hook import memory_overlaps
from ..torch_facts.spans import firsts_of, has_memory, reach, span
from ..values.values import TensorProxy


class Overlaps:
    """A guard: of these tensors, and those that it holds, the same have memory in common as at the time of capture.

    reaches: of each one, in bytes; of one whose sizes vary, minus those of an element. firsts: for each one, the first
    of those that it overlaps with, directly or by others.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor], reaches: Sequence[int]):
        self.held, several = tuple(held), (*tensors, *held)
        self.reaches = struct.pack(f"{len(several)}q", *reaches)
        self.order = bytearray(struct.pack(f"{len(several)}i", *range(len(several))))
        self.firsts = self.now(several)

    @property
    def lowest(self) -> list[int]:
        """``firsts`` as numbers."""
        return list(struct.unpack(f"{len(self.firsts) // 4}i", self.firsts))

    def now(self, tensors: tuple[torch.Tensor, ...]) -> bytes:
        read = memory_overlaps(tensors, self.reaches, self.order)
        return read if read is not None else struct.pack(f"{len(tensors)}i", *firsts_of(list(map(span, tensors))))

    def __call__(self, *tensors: torch.Tensor) -> bool:
        return self.now((*tensors, *self.held)) == self.firsts


def memory_of(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """By the place of a tensor whose memory is known: the first of those that have memory in common with it."""
    places = [place for place, tensor in enumerate(tensors) if has_memory(tensor)]
    firsts = firsts_of([span(tensors[place]) for place in places])
    return {place: places[first] for place, first in zip(places, firsts, strict=True)}


def guard_overlaps(guards: GuardRecorder, inputs: list[TensorProxy]) -> None:
    """For a step that writes into one of its inputs."""
    known = sorted(((p.source, p) for p in inputs if p.source and has_memory(p.real)), key=lambda each: each[0].static)
    if len(known) > 1:
        names = ", ".join(source.name for source, _ in known[:6]) + (", …" if len(known) > 6 else "")
        reached: list[Any] = [p.real for source, p in known if not source.static]
        held: list[Any] = [p.real for source, p in known if source.static]
        holds = Overlaps(reached, held, [reach_of(p) for _, p in known])
        text = "lie apart in memory" if len(set(holds.lowest)) == len(known) else "have the same memory in common"
        guards.holds(names, text, holds, *(source for source, _ in known[: len(reached)]))


def reach_of(proxy: TensorProxy) -> int:
    """As in ``Overlaps.reaches``: of an input whose sizes are guarded."""
    real: Any = proxy.real
    return reach(real) if all(type(size) is int for size in proxy.fake.shape) else -real.itemsize
