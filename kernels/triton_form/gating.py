"""Reading and writing H, in its layout of gate and up, in whole contiguous runs, and cutting a tile in two. Packed H
(bytes): packing.py.

An epilogue that holds a whole tile of gate, up, A and their gradients runs out of registers; it works on halves.
"""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_h(h, row64, row_ok, n0, size_n, GATE: tl.constexpr, WIDTH: tl.constexpr):
    """(gate, up), float32 [rows, WIDTH], columns n0.. of contiguous h; up is gate where there is none."""
    n = n0 + tl.arange(0, WIDTH)
    ok = row_ok[:, None] & (n < size_n)[None, :]
    if GATE == "interleaved":
        m = 2 * n0 + tl.arange(0, 2 * WIDTH)
        pair_ok = row_ok[:, None] & (m < 2 * size_n)[None, :]
        pairs = tl.load(h + row64 * (2 * size_n) + m[None, :], mask=pair_ok, other=0.0)
        gate, up = pairs.reshape(row64.shape[0], WIDTH, 2).split()
        return gate.to(tl.float32), up.to(tl.float32)
    elif GATE == "concat":
        at = h + row64 * (2 * size_n) + n[None, :]
        gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        return gate, tl.load(at + size_n, mask=ok, other=0.0).to(tl.float32)
    else:
        gate = tl.load(h + row64 * size_n + n[None, :], mask=ok, other=0.0).to(tl.float32)
        return gate, gate


@triton.jit
def store_h(h, gate, up, row64, row_ok, n0, size_n, GATE: tl.constexpr, WIDTH: tl.constexpr):
    """Write gate and up (ignored without a gate) to columns n0.. of contiguous h, rounded to its dtype."""
    n = n0 + tl.arange(0, WIDTH)
    ok = row_ok[:, None] & (n < size_n)[None, :]
    dtype = h.dtype.element_ty
    if GATE == "interleaved":
        m = 2 * n0 + tl.arange(0, 2 * WIDTH)
        pair_ok = row_ok[:, None] & (m < 2 * size_n)[None, :]
        pairs = tl.join(gate.to(dtype), up.to(dtype)).reshape(row64.shape[0], 2 * WIDTH)
        tl.store(h + row64 * (2 * size_n) + m[None, :], pairs, mask=pair_ok)
    elif GATE == "concat":
        at = h + row64 * (2 * size_n) + n[None, :]
        tl.store(at, gate.to(dtype), mask=ok)
        tl.store(at + size_n, up.to(dtype), mask=ok)
    else:
        tl.store(h + row64 * size_n + n[None, :], gate.to(dtype), mask=ok)


@triton.jit
def cut(tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The left and right halves of a [ROWS, WIDTH] tile."""
    return tile.reshape(ROWS, 2, WIDTH // 2).permute(0, 2, 1).split()
