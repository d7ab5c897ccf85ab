"""The CPU form's larger calls: a whole layer in one call of C, each thread with experts of its own (native/layer.h).

Against panels, which share each product among the threads: nothing waits between two products, and no time goes to
Python. What a panel does in Python (formats of 8 bits, other activations and dtypes), calls of few rows with large
products, and routing that one expert dominates stay there. The smallest calls are here, with one thread: they would
take Python longer than C.

The sum over a token's experts is taken within each thread's experts first: same bits run for run, and with another
number of threads other ones, as with the library's products themselves.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moebius.kernels import widening
from moebius.kernels.activations import Activation, find_activation
from moebius.kernels.contract import Options
from moebius.kernels.native import panel_work
from moebius.kernels.panels import PANEL_ROWS
from moebius.kernels.products import Matrices, Operands

SLICE = 1 << 19  # numbers of a weight that are widened at a time
SMALL = 1 << 22  # products of numbers in the first of a layer's, for which one thread is enough
PART_ROWS = 512  # of an expert at a time: what the scratch of a thread holds
FEW_ROWS = 6  # the fewest; fewer cost more than they save
UNEVEN = 1.15  # how much longer than the mean the thread with the most rows may take


class Share(NamedTuple):
    """Which rows each thread has. segments: four int64 each (expert, low, high, first); bounds: of groups in them;
    room: the rows of the longest segment; rows: of all; experts: how many have any."""

    segments: array[int]
    bounds: array[int]
    room: int
    rows: int
    experts: int

    @property
    def groups(self) -> int:
        return len(self.bounds) - 1


@lru_cache(maxsize=128)  # backward shares as forward did, layers later
def share(bounds: tuple[int, ...], threads: int, part_rows: int, uneven: float) -> Share | None:
    """Experts for at most so many groups, the longest first to the group with the fewest rows (Graham's LPT rule);
    None where one would have over ``uneven`` times its part, or there is no row. bounds: E+1 offsets."""
    rows = [high - low for low, high in zip(bounds, bounds[1:], strict=False)]
    groups = [list[int]() for _ in range(threads)]
    loads = [0] * threads
    for expert in sorted((e for e, count in enumerate(rows) if count), key=lambda e: -rows[e]):
        least = loads.index(min(loads))
        groups[least].append(expert)
        loads[least] += rows[expert]
    if not bounds[-1] or max(loads) * threads > uneven * sum(loads):
        return None
    segments, ends, room = array("q"), array("q", [0]), 0
    for group in groups:
        for expert in sorted(group):
            parts = -(-rows[expert] // part_rows)
            edges = [bounds[expert] + rows[expert] * part // parts for part in range(parts + 1)]
            for low, high in zip(edges, edges[1:], strict=False):
                segments.extend((expert, low, high, low == edges[0]))
                room = max(room, high - low)
        ends.append(len(segments) // 4)
    return Share(segments, ends, room, bounds[-1], len(rows) - rows.count(0))


def table(blocks: Sequence[Matrices], slices: bool) -> array[int]:
    """Blocks as layer.h has them; slices: no more of each than SLICE numbers at once."""
    numbers = array("q")
    for block in blocks:
        assert block.table is not None
        (rows, columns), (down, right) = (*block.sizes, 1)[:2], (*block.strides, 0)[:2]
        low, address = block.rows.start or 0, block.table.buffer_info()[0]
        step = max(SLICE // max(columns, 1), 1) if slices else rows
        for at in range(0, rows, step) if step < rows else (0,):
            numbers.extend((low + at, address, at * down, min(step, rows - at), columns, down, right))
    return numbers


class Tables:
    """Blocks of weights and biases, or of rooms for their gradients, as layer.h has them."""

    def __init__(self, operands: Operands, wide: bool) -> None:
        self.tables = [table(blocks, wide and place < 2) for place, blocks in enumerate(operands)]

    def numbers(self) -> list[int]:
        """The address and count of each."""
        return [number for blocks in self.tables for number in (blocks.buffer_info()[0], len(blocks) // 7)]


def whole_lines(size: int) -> int:
    """Bytes, up to a whole number of cache lines."""
    return -(-size // 64) * 64


def rowwise(rows: Tensor) -> Tensor:
    """With each row's numbers side by side, as they stand in memory."""
    rows = rows.resolve_neg()
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


class Totals:
    """Room for each group's float32 sums by token [T, D], and for the sum of them in the layer's dtype.

    With one slot a token no two groups meet: they have one room.
    """

    def __init__(self, like_TD: Tensor, groups: int, top_k: int) -> None:
        self.out = torch.empty(like_TD.shape, dtype=like_TD.dtype, device="cpu")
        mine = [self.out] if like_TD.dtype == torch.float32 else []
        one = groups == 1 or top_k == 1
        made = (1 if one else groups) - len(mine)
        rooms = [*mine, *torch.empty(made, *like_TD.shape, dtype=torch.float32, device="cpu")]
        self.rooms = [rooms[0].zero_()] * groups if one else rooms  # kept alive
        self.addresses = array("q", map(panel_work.address, self.rooms))
        self.distinct = len(set(self.addresses))


@dataclass
class Layer:
    """A call that C does. order_S: the slot of each row; scale_TK: float32. h_SM is None where H is not kept."""

    x_TD: Tensor
    weights: Operands
    shared: Share
    order_S: Tensor
    scale_TK: Tensor | None
    h_SM: Tensor | None
    options: Options
    top_k: int
    wide: bool

    def forward(self) -> Tensor:
        """[T, D]; H is written into h_SM."""
        totals = Totals(self.x_TD, self.shared.groups, self.top_k)
        self.run(panel_work.layer_forward, totals, self.width + self.narrow + self.again + self.wide * self.width_h)
        return totals.out

    def backward(self, grad_TD: Tensor, dot_TK: Tensor | None, grads: Operands, needs_x: bool) -> Tensor | None:
        """The gradient of x, if it is needed; those of the weights are written into the rooms given, <dA, A> of each
        slot that is an expert's into dot_TK (float32)."""
        totals = Totals(self.x_TD, self.shared.groups, self.top_k) if needs_x else None
        grad_TD, tables = rowwise(grad_TD), Tables(grads, self.wide)
        self.run(
            panel_work.layer_backward, totals, self.width + 2 * self.narrow + self.width_h + self.again,
            grad_TD.data_ptr(), grad_TD.stride(0), panel_work.address(dot_TK), *tables.numbers())
        return None if totals is None else totals.out

    @property
    def width(self) -> int:
        return self.x_TD.shape[1]

    @property
    def narrow(self) -> int:
        return self.weights.down[0].sizes[1]

    @property
    def width_h(self) -> int:
        return sum(block.sizes[0] for block in self.weights.gate_up)

    @property
    def again(self) -> int:
        """Scratch for H where it is not kept."""
        return self.width_h if self.h_SM is None else 0

    def run(self, function: Callable[[int], None], totals: Totals | None, scratch_width: int, *backward: int) -> None:
        """scratch_width: numbers that a row takes of a group's scratch."""
        x_TD, shared, options = rowwise(self.x_TD), self.shared, self.options
        tables = Tables(self.weights, self.wide)
        work = torch.float32 if self.wide else x_TD.dtype
        matrix = shared.room * scratch_width * work.itemsize
        widened = max(SLICE, self.width, self.narrow) * work.itemsize if self.wide else 0
        lists = whole_lines(matrix + widened)
        scratch = torch.empty(shared.groups, whole_lines(lists + 12 * shared.room), dtype=torch.uint8, device="cpu")
        activation = find_activation(options.activation, options.gate)
        assert isinstance(activation, Activation)
        sums = (0, 0, 0) if totals is None else (totals.addresses.buffer_info()[0], totals.distinct,
                                                 totals.out.data_ptr())
        task = array("q", (  # layer.h's Layer
            panel_work.DTYPES[x_TD.dtype], panel_work.DTYPES[work], panel_work.ACTIVATIONS[activation.name],
            panel_work.GATES[options.gate], x_TD.shape[0], self.width, self.narrow, self.width_h, shared.rows,
            x_TD.data_ptr(), x_TD.stride(0), self.order_S.data_ptr(), self.top_k, panel_work.address(self.scale_TK),
            0 if self.h_SM is None else self.h_SM.data_ptr(), *tables.numbers(),
            shared.segments.buffer_info()[0], shared.bounds.buffer_info()[0], shared.groups, *sums,
            scratch.data_ptr(), scratch.shape[1], shared.room, matrix, lists, *(backward or (0,) * 11)))
        function(task.buffer_info()[0])


def layer(x_TD: Tensor, weights: Operands, bounds: Sequence[int], order_S: Tensor, weight_TK: Tensor | None,
          h_SM: Tensor | None, options: Options, top_k: int) -> Layer | None:
    """The call, where C does it; None where panels do. bounds: E+1 offsets."""
    if not knows(x_TD.dtype, options) or not weights.gate_up:
        return None
    if any(block.table is None or block.dtype != x_TD.dtype for blocks in weights for block in blocks):
        return None
    rows, width, narrow = order_S.shape[0], x_TD.shape[1], weights.down[0].sizes[1]
    width_h = sum(block.sizes[0] for block in weights.gate_up)
    small = rows * width * width_h <= SMALL
    threads = 1 if small else torch.get_num_threads()
    if not small and (rows <= PANEL_ROWS or top_k > 1 and threads > max(2, top_k)):
        return None
    if h_SM is not None and (h_SM.dtype != x_TD.dtype or not panel_work.by_rows(h_SM) or h_SM.shape[0] != rows):
        return None  # a hook on saved tensors may have given back something else
    part_rows = PART_ROWS
    if small and x_TD.dtype.itemsize > 2:  # (of narrower ones each part would widen its weights anew)
        # backward's scratch is then about half of H at most: the peak of a small model's step may be here
        part_rows = min(PART_ROWS, max(FEW_ROWS, rows * width_h // (2 * (width + 2 * narrow + width_h))))
    shared = share(tuple(bounds), threads, part_rows, UNEVEN)
    if shared is None:
        return None
    wide = shared.rows >= widening.rows_from(x_TD.dtype) * shared.experts
    scale_TK = None if weight_TK is None else weight_TK.to(torch.float32).contiguous().resolve_neg()
    return Layer(x_TD, weights, shared, order_S, scale_TK, h_SM, options, top_k, wide)


def knows(dtype: torch.dtype, options: Options) -> bool:
    """Whether C computes such experts."""
    activation = find_activation(options.activation, options.gate)
    return options.precision is None and panel_work.multiplies() and panel_work.knows(dtype, activation)


def can_write(rooms: Operands) -> bool:
    """Whether C writes gradients there."""
    return all(block.table is not None for blocks in rooms for block in blocks)
