"""The CPU form's GEMMs: a panel's rows times their experts' weights, and weight gradients, one expert after another.

The library multiplies. To find the operands of a small product costs Python as much as a tenth of the product, so C
does that for a whole panel, and calls torch (native/products.c). For the 8 bit formats, mixed dtypes, and in a
checkout that was not built, the loops here call torch.mm, which is the same product. 16 bits are multiplied in float32
where that is faster (widening.py), and the product rounded.
"""
from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moebius.kernels import widening
from moebius.kernels.native import panel_work
from moebius.kernels.panels import Panel, Segment
from moebius.kernels.quantize import round_gate_up, round_left, round_matrix, round_outer

if TYPE_CHECKING:
    from moebius.kernels.native.rows import Operand


class Blocks:
    """A weight [E, rows, …] as blocks of rows, one after another: each one tensor of all experts, or one an expert.

    blocks: (which rows, the tensors). As room for gradients: an expert that is None gets none.
    """

    def __init__(self, blocks: list[tuple[slice, Tensor | Sequence[Tensor | None]]]) -> None:
        self.blocks = blocks

    @property
    def shape(self) -> tuple[int, ...]:
        rows, parts = self.blocks[-1]
        assert parts[0] is not None
        return (len(parts), rows.stop, *parts[0].shape[1:])


class BlockWeights(NamedTuple):
    """As contract.Weights, of weights that are not one tensor."""

    gate_up_E2ND: Blocks
    down_EDN: Blocks
    gate_up_bias_EM: Blocks | None
    down_bias_ED: Blocks | None


class Matrices:
    """Some rows of a weight, or of room for its gradient, of all experts; C finds them by a table of addresses.

    rows: which. parts: [E, rows, …], or one of each expert, None where there is no room. table: None where C does not
    know the dtype, or the experts' strides differ.
    """

    def __init__(self, rows: slice, parts: Tensor | Sequence[Tensor | None]) -> None:
        self.rows, self.parts = rows, parts
        self.table: array[int] | None = None
        if not panel_work.multiplies():
            return
        if (found := panel_work.table([parts] if isinstance(parts, Tensor) else parts)) is None:
            return  # (what a view with the negative bit means does not stand in its memory)
        dtype, self.sizes, self.strides, addresses = found
        if dtype not in panel_work.MULTIPLIED or 0 in self.sizes:
            return  # (the address of no numbers is 0, as that of a part that is not there: C would write no product)
        self.dtype, self.table = dtype, array("q", addresses)
        if isinstance(parts, Tensor):
            (first,), step = self.table, self.strides[0] * dtype.itemsize
            self.sizes, self.strides = self.sizes[1:], self.strides[1:]
            self.table = array("q", [first + expert * step for expert in range(parts.shape[0])])

    def operand(self, transposed: bool = False) -> Operand:
        assert self.table is not None
        (rows, columns), (down, right) = self.sizes, self.strides
        address = self.table.buffer_info()[0]
        return (address, columns, rows, right, down, -1) if transposed else (address, rows, columns, down, right, -1)


def matrices(weight: Tensor | Blocks | None) -> list[Matrices]:
    """A weight's blocks; none of None."""
    if weight is None:
        return []
    blocks = [(slice(None), weight)] if isinstance(weight, Tensor) else weight.blocks
    return [Matrices(rows, parts) for rows, parts in blocks]


class Operands(NamedTuple):
    """A call's weights, or the rooms for their gradients."""

    gate_up: list[Matrices]
    down: list[Matrices]
    gate_up_bias: list[Matrices]
    down_bias: list[Matrices]


def existing(part: Tensor | None) -> Tensor:
    assert part is not None
    return part


def in_c(weights: Matrices, *rows: Tensor) -> bool:
    """Whether C multiplies these."""
    return weights.table is not None and all(tensor.dtype == weights.dtype for tensor in rows)


def along(rows: Tensor, axis: int) -> Operand:
    """A panel's rows [n, width] as an operand, the rows along this axis of the matrix."""
    (count, width), (down, right) = rows.shape, rows.stride()
    if axis == 0:
        return rows.data_ptr(), count, width, down, right, 0
    return rows.data_ptr(), width, count, right, down, 1


def is_wide(left: Tensor, right: Tensor, rows: int) -> bool:
    """Whether left @ right, of so many rows of an expert, is multiplied in float32."""
    return left.device.type == "cpu" and rows >= widening.rows_from(
        left.dtype, dots=left.stride(1) == 1 and right.stride(0) == 1)


def product(out: Tensor, left: Tensor, right: Tensor, rows: int, add: bool = False) -> None:
    """out (+)= left @ right, of so many rows of an expert."""
    if is_wide(left, right, rows):
        wide = left.to(torch.float32) @ right.to(torch.float32)
        out.add_(wide) if add else out.copy_(wide)
    elif add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def linear(rows: Tensor, weight: list[Matrices], panel: Panel, out: Tensor, name: str | None = None) -> Tensor:
    """out[r] = weight[expert of r] @ rows[r], for a panel's rows, in the format of that name."""
    for block in weight:
        target = out[:, block.rows]
        if name is None and in_c(block, rows, out):
            panel_work.products(along(target, 0), along(rows, 0), block.operand(transposed=True), panel, block.dtype,
                                panel_work.NEVER, widening.rows_from(block.dtype, dots=block.strides[1] == 1))
            continue
        lefts = panel.cut(rows if name is None else round_left(rows, name))
        for left, to, segment in zip(lefts, panel.cut(target), panel.segments, strict=True):
            matrix = existing(block.parts[segment.expert]).T
            if name is None:
                product(to, left, matrix, len(left))
            else:
                to.copy_(left @ round_matrix(matrix, name))
    return out


def multiply(rows: Tensor, weight: list[Matrices], panel: Panel, out: Tensor, name: str | None = None) -> Tensor:
    """out[r] = rows[r] @ weight[expert of r], for a panel's rows, in the format of that name."""
    for number, block in enumerate(weight):
        mine = rows[:, block.rows]
        if name is None and in_c(block, rows, out):
            panel_work.products(along(out, 0), along(mine, 0), block.operand(), panel, block.dtype,
                                panel_work.ALWAYS if number else panel_work.NEVER,
                                widening.rows_from(block.dtype, dots=block.strides[0] == 1))
            continue
        lefts = panel.cut(mine if name is None else round_left(mine, name))
        for left, to, segment in zip(lefts, panel.cut(out), panel.segments, strict=True):
            matrix = existing(block.parts[segment.expert])
            if name is not None:
                to.copy_(left @ round_matrix(matrix, name))
            else:
                product(to, left, matrix, len(left), add=number > 0)
    return out


def project_up(rows: Tensor, weights: Operands, panel: Panel, out: Tensor, gate: str, name: str | None) -> Tensor:
    """H of a panel: rows [n, D] -> out [n, M]."""
    if name is None:
        linear(rows, weights.gate_up, panel, out)
    else:
        lefts, (block,) = panel.cut(round_left(rows, name)), weights.gate_up
        for left, to, segment in zip(lefts, panel.cut(out), panel.segments, strict=True):
            to.copy_(left @ round_gate_up(existing(block.parts[segment.expert]), gate, name).T)
    for block in weights.gate_up_bias:
        for to, segment in zip(panel.cut(out[:, block.rows]), panel.segments, strict=True):
            to += existing(block.parts[segment.expert])
    return out


def accumulate_outer(total: list[Matrices], left: Tensor, right: Tensor, panel: Panel, name: str | None) -> None:
    """total[e] (+)= left[rows of e].T @ right[rows of e], for a panel's rows, in the format of that name.

    An expert is cut at multiples of PANEL_ROWS of its rows, and so never within a format's block.
    """
    for block in total:
        mine = left[:, block.rows]
        if name is None and in_c(block, left, right):
            panel_work.products(block.operand(), along(mine, 1), along(right, 0), panel, block.dtype, panel_work.LATER,
                                widening.rows_from(block.dtype))
            continue
        for part, other, segment in zip(panel.cut(mine), panel.cut(right), panel.segments, strict=True):
            room = block.parts[segment.expert]
            if room is None:
                continue
            if name is not None:
                add(room, round_outer(part, name).T @ round_outer(other, name), segment)
            else:
                product(room, part.T, other, len(part), add=not segment.first)


def accumulate_sums(total: list[Matrices], rows: Tensor, panel: Panel) -> None:
    """total[e] (+)= the sum of e's rows, for a panel's rows."""
    for block in total:
        for part, segment in zip(panel.cut(rows[:, block.rows]), panel.segments, strict=True):
            room = block.parts[segment.expert]
            if room is not None:
                add(room, part.sum(0), segment)


def add(room: Tensor, part: Tensor, segment: Segment) -> None:
    room.copy_(part) if segment.first else room.add_(part)
