"""The work of one layer of experts: operations, bytes, and what backward is kept for it.

Bytes are those that no form of the operator can do without: weights of the experts that have rows, rows in and out, H
kept and read again. What a form moves on top of it (rows sorted, sums of a token's rows) is not in it.

Letters: T tokens, K slots a token, S = T·K rows, D model width, n expert width, M columns of the first product (2·n
with a gate), E experts, b bytes of a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebius.lowering.planner.hardware import PRECISIONS, Device, Reached
from moebius.lowering.planner.work import Work, base_precision

WHOLE = Reached(tile=1)  # what is asked for, whatever a device makes of it
H_BYTES = {"fp8": 1.0, "recompute": 0.0}  # of a number of H, where the layer says what it keeps


@dataclass(frozen=True)
class Layer:
    """tokens T, top_k K, width D, inner n, up M, experts E; busy: experts that have rows; element: b; save, precision:
    the operator's options ("default", ""); needs: whether X, and the two weights, get gradients."""

    tokens: int
    top_k: int
    width: int
    inner: int
    up: int
    experts: int
    busy: int
    element: int
    save: str = "default"
    precision: str = ""
    needs: tuple[bool, bool, bool] = (True, True, True)

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def parameters(self) -> int:
        """Of one expert."""
        return self.width * (self.up + self.inner)

    @property
    def kept_h(self) -> float:
        """Bytes of H that backward needs."""
        return self.rows * self.up * H_BYTES.get(self.save, self.element)

    @property
    def kept(self) -> float:
        """Bytes that backward needs: X once, and H of each row."""
        return self.tokens * self.width * self.element + self.kept_h

    def filled(self, tile: int) -> float:
        """Rows in whole tiles: half a tile is lost with each expert that has rows."""
        return self.rows + self.busy * (tile - 1) / 2

    @property
    def each(self) -> float:
        """Rows of an expert that has some."""
        return self.rows / max(self.busy, 1)

    def moved(self, reached: Reached, wide: int, up: int, inner: int, weights: int) -> float:
        """Bytes: so many passes over rows as wide as X, H and A where products and passes are apart; else what goes in
        and out. weights: experts whose matrices are read or written."""
        if reached.overlaps:
            wide, up, inner = wide // 3 + 1, 0, 0
        rows = self.rows * (wide * self.width + up * self.up + inner * self.inner)
        return (weights * self.parameters + rows) * self.element + self.kept_h + reached.written([self.kept_h])

    def forward(self, reached: Reached | None = None) -> Work:
        reached = reached or WHOLE
        moved = self.moved(reached, 5, 1, 2, self.busy)
        return Work("grouped", 2 * self.filled(reached.tile) * self.parameters, moved, 2, self.each)

    def backward(self, reached: Reached | None = None) -> Work:
        """Gradients of rows and weights; with save="recompute" the first product once more."""
        reached = reached or WHOLE
        filled, weights = self.filled(reached.tile), self.experts * self.width * self.element
        x, first, second = self.needs
        columns = (x + first + (self.save == "recompute")) * self.up + (1 + second) * self.inner
        moved = self.moved(reached, 8, 2, 4, self.busy + self.experts * (first or second))
        moved += reached.written([weights * self.up * first, weights * self.inner * second])
        return Work("grouped", 2 * filled * self.width * columns, moved, 4 + (self.save == "recompute"), self.each)

    def seconds(self, device: Device, trains: bool = True) -> float:
        """On a device, forward and, where it trains, backward."""
        precision, reached = self.precision or base_precision(device), device.reached
        works = [self.forward(reached), *([self.backward(reached)] if trains else [])]
        return sum(work.seconds(device, precision) for work in works)


def variants(layer: Layer, device: Device) -> Iterator[tuple[str, Layer]]:
    """The layer with another saving, precision or number of experts a token."""
    for save in ("default", "fp8", "recompute"):
        if save != layer.save:
            yield f"save={save!r}", replace(layer, save=save)
    for precision in PRECISIONS[1:]:
        if precision in device.rates and precision != layer.precision:
            yield f"precision={precision!r}", replace(layer, precision=precision)
    for top_k in (layer.top_k // 2, layer.top_k * 2):
        if 1 <= top_k <= layer.experts:
            yield f"top-{top_k}", replace(layer, top_k=top_k, busy=min(layer.experts, layer.tokens * top_k))
