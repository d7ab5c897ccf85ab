"""Sorted rows in panels: how the CPU form cuts them, and the room that each panel reuses."""
from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PANEL_ROWS = 1024


class Segment(NamedTuple):
    """Rows low:high of a panel, all of one expert; first: no earlier panel has this expert."""

    expert: int
    low: int
    high: int
    first: bool


class Panel:
    """Sorted rows start:stop, at least one. segments: all of them, expert after expert."""

    def __init__(self, start: int, stop: int, segments: list[Segment]) -> None:
        self.start, self.stop, self.segments = start, stop, segments
        self.sizes = [segment.high - segment.low for segment in segments]
        self.table = array("q", [number for segment in segments for number in segment])  # as C reads them

    def cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A view of each segment's rows. rows: the panel's, [stop - start, …]."""
        return rows.split(self.sizes)


def panels(bounds: Sequence[int]) -> Iterator[Panel]:
    """The experts' rows in sorted order; an expert is cut only where it is larger than a panel. bounds: E+1 offsets."""
    start, segments = 0, list[Segment]()
    for expert, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if segments and high - start > PANEL_ROWS:
            yield Panel(start, low, segments)
            start, segments = low, []
        for at in range(low, high, PANEL_ROWS):
            stop = min(at + PANEL_ROWS, high)
            segments.append(Segment(expert, at - start, stop - start, at == low))
            if stop < high:
                yield Panel(start, stop, segments)
                start, segments = stop, []
    if segments:
        yield Panel(start, bounds[-1], segments)


class Scratch:
    """Buffers of one call, made on first use at a full panel's size and handed out as slices."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self.like, self.rows = like, min(rows, PANEL_ROWS)
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised [rows, width] slice of the buffer called name."""
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = self.buffers[name] = self.like.new_empty((self.rows, width), dtype=dtype or self.like.dtype)
        return buffer[:rows]

    def gather(self, name: str, source: Tensor, token: Tensor) -> Tensor:
        """source[token] in the buffer called name."""
        return torch.index_select(source, 0, token, out=self.take(name, token.shape[0], source.shape[1]))

    def drop(self, *names: str) -> None:
        """Let go of buffers that are not taken again soon."""
        for name in names:
            self.buffers.pop(name, None)
