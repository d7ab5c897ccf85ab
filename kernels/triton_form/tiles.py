"""Grouped scheduling over device-side counts: which expert and which rows a program works on.

The host never learns the counts. It launches the most tiles that there can be; a small table on the device gives each
tile its expert and first row; tiles past the real ones find expert E and return at once.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class TileTable(NamedTuple):
    """expert: int32 [limit], E for an unused tile; row: int32 [limit], the tile's first sorted row."""

    expert: Tensor
    row: Tensor
    offsets: Tensor
    block_m: int

    @property
    def limit(self) -> int:
        return self.expert.shape[0]


def tile_limit(rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles that ``rows`` rows can need, however they fall on the experts."""
    return rows // block_m + min(rows, num_experts)


def make_tiles(offsets: Tensor, rows: int, block_m: int) -> TileTable:
    """The table for sorted rows. offsets: int32 [E+1]; rows: S, an upper bound of offsets[E]."""
    num_experts = offsets.shape[0] - 1
    limit = tile_limit(rows, num_experts, block_m)
    tiles_E = (offsets.diff() + (block_m - 1)) // block_m
    ends_E = tiles_E.cumsum(0, dtype=torch.int32)
    tile = torch.arange(limit, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(ends_E, tile, right=True, out_int32=True)
    inside = expert.clamp(max=num_experts - 1).long()
    row = offsets[inside] + (tile - (ends_E - tiles_E)[inside]) * block_m
    return TileTable(expert, row.to(torch.int32), offsets, block_m)


def grid_of(table: TileTable, columns: int, waves: int) -> tuple[int]:
    """Programs of a launch: one for each piece of work or, persistent, ``waves`` a multiprocessor that go on to the
    next piece (waves 0: not persistent)."""
    pieces = table.limit * columns
    if not waves or not table.expert.is_cuda:
        return (pieces,)
    processors = torch.cuda.get_device_properties(table.expert.device).multi_processor_count
    return (min(pieces, waves * processors),)


@triton.jit
def turns(pieces, PERSISTENT: tl.constexpr):
    """How many pieces of work this program has. One, known to the compiler, where there is a program for each: around
    a real loop it would compute the epilogue's addresses beforehand, and hold them in registers all through the
    product."""
    if PERSISTENT:
        return tl.cdiv(pieces - tl.program_id(0), tl.num_programs(0))
    else:
        return 1


@triton.jit
def place(turn, num_tiles, num_columns, GROUP: tl.constexpr):
    """(tile, column) of a program's piece of work, walking GROUP tiles down before the next column, so that weights
    stay in L2."""
    work = tl.program_id(0) + turn * tl.num_programs(0)
    span = GROUP * num_columns
    first = work // span * GROUP
    size = min(num_tiles - first, GROUP)
    within = work % span
    return first + within % size, within // size
