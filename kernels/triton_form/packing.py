"""H in MXFP8 (quantize.py) written and read by the kernels: save="fp8" without an H of 16 or 32 bits.

A row of packed H: its M elements in E4M3, then a scale (E8M0) for each 32 of them, as quantize.pack lays them out and
with the same bits. H is rounded to the tensors' dtype first, since that is what would have been kept. An epilogue can
do it where the blocks of 32 lie whole within its columns; layers where they do not (``fused_parts``) keep to torch's
operators.

Rounding and values are written out in integers: Triton's interpreter converts to and from fp8 wrongly.
"""
from __future__ import annotations

import triton
import triton.language as tl

from moebius.kernels.quantize import BLOCK
from moebius.kernels.triton_form.formats import exponent_of, magnitude, power, widen


def fused_parts(gate: str, narrow: int, block_n: int, parts: int) -> int:
    """In how many pieces (at most ``parts``) an epilogue of block_n columns works on packed H; 0: the blocks of 32 do
    not lie within its columns. N = ``narrow``: concat's second half must begin a block; the last block may be short.
    """
    if gate == "concat" and narrow % BLOCK:
        return 0
    least = BLOCK // 2 if gate == "interleaved" else BLOCK  # columns: interleaved has two elements in each
    if block_n < least:
        return 1 if block_n >= narrow else 0  # one short block is the whole row
    return min(parts, block_n // least)


@triton.jit
def code_of(x):
    """The bits of float32 x, at most 448, rounded to nearest even in E4M3; int32."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent's bias: 127 there, 7 here
    # below 2**-6 values are multiples of 2**-9, as floats from 2**14 to 2**15 are
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def value_of(code):
    """The float32 that E4M3's bits are; code_of backwards. Not for its NaN, which no packed element is."""
    size = code & 0x7F
    small = (size + 0x46800000).to(tl.float32, bitcast=True) - 16384.0
    normal = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, small, normal).to(tl.int32, bitcast=True)
    return (value | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, k, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Elements [ROWS, WIDTH] of blocks of GROUP columns with exponents k [ROWS, blocks, 1]: uint8."""
    # k is at most 120, so that 2**-k is a normal float32; of a block that is not finite nothing is kept
    code = code_of(x.reshape(ROWS, WIDTH // GROUP, GROUP) * power(-k))
    return tl.where(k == 128, 0, code).reshape(ROWS, WIDTH).to(tl.uint8)


@triton.jit
def exponents_of(size, columns_ok, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Exponents [ROWS, blocks, 1] of blocks of GROUP columns; size: magnitudes [ROWS, WIDTH], ignored past the row."""
    size = tl.where(columns_ok[None, :], size, 0)
    return exponent_of(tl.max(size.reshape(ROWS, WIDTH // GROUP, GROUP), 2, keep_dims=True))


@triton.jit
def store_scales(at, k, row_ok, first, width, ROWS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Exponents of the blocks from element ``first`` of a run of ``width`` elements; at: the run's scales [ROWS, 1].

    They are summed over their block, GROUP times the same: a sum of floats is what the compiler does not repeat. From
    the exponents as they are it packs every row a second time, in a layout with all of a row in one thread, for the
    sake of this store.
    """
    block = first // 32 + tl.arange(0, BLOCKS)
    scale = tl.sum(((k + 127).to(tl.float32) * (1 / GROUP)).broadcast_to(ROWS, BLOCKS, GROUP), 2)
    tl.store(at + block[None, :], scale.to(tl.int32).to(tl.uint8),
             mask=row_ok[:, None] & (block * 32 < width)[None, :])


@triton.jit
def load_scales(at, row_ok, first, width, BLOCKS: tl.constexpr):
    """Exponents [rows, blocks, 1] of the blocks from element ``first``; 128 where a block is not finite."""
    block = first // 32 + tl.arange(0, BLOCKS)
    mask = row_ok[:, None] & (block * 32 < width)[None, :]
    return (tl.load(at + block[None, :], mask=mask, other=0).to(tl.int32) - 127)[:, :, None]


@triton.jit
def store_run(elements, scales, x, row_ok, n0, size_n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns n0.. of a run of size_n elements; elements, scales: where the run's begin, [ROWS, 1]."""
    GROUP: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    n = n0 + tl.arange(0, WIDTH)
    k = exponents_of(magnitude(x), n < size_n, ROWS, WIDTH, GROUP)
    tl.store(elements + n[None, :], encode(x, k, ROWS, WIDTH, GROUP), mask=row_ok[:, None] & (n < size_n)[None, :])
    store_scales(scales, k, row_ok, n0, size_n, ROWS, WIDTH // GROUP, GROUP)


@triton.jit
def load_run(elements, scales, row_ok, n0, size_n, DTYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What store_run wrote: float32, rounded to DTYPE as quantize.unpack rounds it."""
    GROUP: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    n = n0 + tl.arange(0, WIDTH)
    code = tl.load(elements + n[None, :], mask=row_ok[:, None] & (n < size_n)[None, :], other=0).to(tl.int32)
    k = load_scales(scales, row_ok, n0, size_n, WIDTH // GROUP)
    parts = widen(value_of(code).reshape(ROWS, WIDTH // GROUP, GROUP), k)
    return parts.reshape(ROWS, WIDTH).to(DTYPE).to(tl.float32)


@triton.jit
def store_packed(h, gate, up, row64, row_ok, n0, size_n, h_row, DTYPE: tl.constexpr, GATE: tl.constexpr,
                 WIDTH: tl.constexpr):
    """gating.store_h into packed h, whose rows are h_row bytes apart. row64: [rows, 1]; DTYPE: of the tensors."""
    ROWS: tl.constexpr = row64.shape[0]
    row = h + row64 * h_row
    gate = gate.to(DTYPE).to(tl.float32)
    if GATE == "none":
        store_run(row, row + size_n, gate, row_ok, n0, size_n, ROWS, WIDTH)
    else:
        up = up.to(DTYPE).to(tl.float32)
        scales = row + 2 * size_n
        if GATE == "concat":
            store_run(row, scales, gate, row_ok, n0, size_n, ROWS, WIDTH)
            store_run(row + size_n, scales + size_n // 32, up, row_ok, n0, size_n, ROWS, WIDTH)
        else:
            n_ok = n0 + tl.arange(0, WIDTH) < size_n
            k = exponents_of(tl.maximum(magnitude(gate), magnitude(up)), n_ok, ROWS, WIDTH, 16)
            pairs = tl.join(encode(gate, k, ROWS, WIDTH, 16), encode(up, k, ROWS, WIDTH, 16))
            m = 2 * n0 + tl.arange(0, 2 * WIDTH)
            tl.store(row + m[None, :], pairs.reshape(ROWS, 2 * WIDTH),
                     mask=row_ok[:, None] & (m < 2 * size_n)[None, :])
            store_scales(scales, k, row_ok, 2 * n0, 2 * size_n, ROWS, WIDTH // 16, 16)


@triton.jit
def load_packed(h, row64, row_ok, n0, size_n, h_row, DTYPE: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr):
    """gating.load_h from packed h: (gate, up), float32 [rows, WIDTH]; up is gate where there is none."""
    ROWS: tl.constexpr = row64.shape[0]
    row = h + row64 * h_row
    if GATE == "none":
        gate = load_run(row, row + size_n, row_ok, n0, size_n, DTYPE, ROWS, WIDTH)
        return gate, gate
    else:
        scales = row + 2 * size_n
        if GATE == "concat":
            gate = load_run(row, scales, row_ok, n0, size_n, DTYPE, ROWS, WIDTH)
            return gate, load_run(row + size_n, scales + size_n // 32, row_ok, n0, size_n, DTYPE, ROWS, WIDTH)
        else:
            pairs = load_run(row, scales, row_ok, 2 * n0, 2 * size_n, DTYPE, ROWS, 2 * WIDTH)
            gate, up = pairs.reshape(ROWS, WIDTH, 2).split()
            return gate, up
