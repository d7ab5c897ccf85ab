"""GEMMs with 8-bit operands (precision.py): tiles are rounded to E4M3 after they were loaded, and then multiplied.

Nothing is written in 8 bits, so nothing is kept and no temporary is made, but for "fp8", whose scales are of a whole
contraction: a kernel of its own finds those first, one int32 a row. What is multiplied:

- "fp8", "fp8_block": E4M3 values on the tensor cores (QGMMA on sm_90), scaled after the contraction, or after each 128
  of it. Hopper adds products within an instruction with fewer bits than float32 (DeepSeek-AI 2024, section 3.3.2).
- "mxfp8": rounded values times their scales in bfloat16, which holds them exactly: Hopper has no scales of 32.

Rounding is written out in integers and float32: Triton's interpreter converts to fp8 wrongly, and reads its NaN as a
number.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from moebius.kernels.triton_form.launch import Launch, submit

BAD = 128  # the exponent of a block that holds something not finite
ROWS, COLUMNS = 32, 256


@triton.jit
def power(k):
    """2**k, k in [-126, 127]; -127 gives 0."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_by(x, k):
    """x * 2**k in two steps: 2**k alone may lie outside float32."""
    half = k >> 1
    return x * power(half) * power(k - half)


@triton.jit
def exponent_of(largest):
    """The smallest k with largest <= 448 * 2**k, at least -127; BAD for what is not finite. largest: float32's bits."""
    k = (largest >> 23) - 135 + tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(largest >= 0x7F800000, 128, tl.maximum(k, -127))


@triton.jit
def magnitude(x):
    """Bits of |x|: in the order of the numbers, with infinity and NaN as the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_e4m3(x):
    """float32, at most 448, rounded to nearest even in E4M3."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # below 2**-6 values are multiples of 2**-9, as floats from 2**14 to 2**15 are
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def round_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, WIDTH] in groups of GROUP along the second axis: (rounded, unscaled; exponents), [ROWS, groups, .]."""
    parts = x.to(tl.float32).reshape(ROWS, WIDTH // GROUP, GROUP)
    k = exponent_of(tl.max(magnitude(parts), 2, keep_dims=True))
    return to_e4m3(scale_by(parts, -k)), k


@triton.jit
def widen(parts, k):
    """Rounded values times their scales; NaN where the group is BAD."""
    return tl.where(k == 128, float("nan"), scale_by(parts, tl.minimum(k, 127)))


@triton.jit
def multiply(a, b, total, k_a, k_b, FORMAT: tl.constexpr, MATRIX: tl.constexpr, NARROW: tl.constexpr,
             WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr):
    """total + a [M, K] @ b [K, N], in a format ("none": as they are).

    k_a [M], k_b [N]: exponents of rows and columns, for "fp8" only, whose total is left unscaled. MATRIX: b is weights
    and has blocks of 128x128 where the format has them, else of 1x128. NARROW, WIDE: what E4M3 values, and these with
    their scales, are multiplied in.
    """
    if FORMAT == "none":
        return tl.dot(a, b, total, input_precision=PRECISION)
    elif FORMAT == "fp8":
        a = to_e4m3(scale_by(a.to(tl.float32), -k_a[:, None]))
        b = to_e4m3(scale_by(b.to(tl.float32), -k_b[None, :]))
        return tl.dot(a.to(NARROW), b.to(NARROW), total)
    elif FORMAT == "fp8_block":
        rows, k_rows = round_rows(a, BLOCK_M, BLOCK_K, BLOCK_K)
        k_rows = k_rows.reshape(BLOCK_M, 1)
        if MATRIX:
            columns = b.to(tl.float32)
            k_columns = exponent_of(tl.max(tl.max(magnitude(columns), 1, keep_dims=True), 0, keep_dims=True))
        else:
            columns = b.to(tl.float32)
            k_columns = exponent_of(tl.max(magnitude(columns), 0, keep_dims=True))
        columns = to_e4m3(scale_by(columns, -k_columns))
        part = tl.dot(rows.reshape(BLOCK_M, BLOCK_K).to(NARROW), columns.to(NARROW))
        bad = (k_rows == 128) | (k_columns == 128)
        return total + tl.where(bad, float("nan"), scale_by(part, k_rows + k_columns))
    else:
        GROUP: tl.constexpr = 32 if BLOCK_K >= 32 else BLOCK_K
        rows, k_rows = round_rows(a, BLOCK_M, BLOCK_K, GROUP)
        rows = widen(rows, k_rows).reshape(BLOCK_M, BLOCK_K).to(WIDE)
        columns = b.to(tl.float32).reshape(BLOCK_K // GROUP, GROUP, BLOCK_N)
        k_columns = exponent_of(tl.max(magnitude(columns), 1, keep_dims=True))
        columns = widen(to_e4m3(scale_by(columns, -k_columns)), k_columns).reshape(BLOCK_K, BLOCK_N).to(WIDE)
        return tl.dot(rows, columns, total, input_precision=PRECISION)


@triton.jit
def finish_scales(total, k_a, k_b, FORMAT: tl.constexpr):
    """The scales of "fp8", once the contraction is done."""
    if FORMAT == "fp8":
        bad = (k_a[:, None] == 128) | (k_b[None, :] == 128)
        total = tl.where(bad, float("nan"), scale_by(total, k_a[:, None] + k_b[None, :]))
    return total


@triton.jit
def load_exponents(at, ok, FORMAT: tl.constexpr):
    """Exponents of "fp8"; zeros for another format."""
    if FORMAT == "fp8":
        return tl.load(at, mask=ok, other=0)
    else:
        return tl.zeros_like(ok.to(tl.int32))


@triton.jit
def exponents_kernel(x, out, num_rows, num_columns, per_matrix, stride_e, stride_row, stride_column,
                     BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = row < num_rows
    at = x + (row // per_matrix).to(tl.int64) * stride_e + (row % per_matrix).to(tl.int64) * stride_row
    largest = tl.zeros((BLOCK_R,), tl.int32)
    for c0 in range(0, num_columns, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        tile = tl.load(at[:, None] + c.to(tl.int64)[None, :] * stride_column,
                       mask=row_ok[:, None] & (c < num_columns)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(magnitude(tile.to(tl.float32)), 1))
    tl.store(out + row, exponent_of(largest), mask=row_ok)


def exponents(x: Tensor, name: str | None) -> Tensor:
    """The exponent of each row of x, [R, K] or [E, R, K], any strides: int32 [R] or [E, R]. Not for "fp8": no rows."""
    if name != "fp8":
        return x.new_empty((0, *x.shape[1:-1]), dtype=torch.int32)
    *lead, rows, columns = x.shape
    out = x.new_empty(x.shape[:-1], dtype=torch.int32)
    submit(Launch(
        exponents_kernel, (triton.cdiv(out.numel(), ROWS),),
        dict(x=x, out=out, num_rows=out.numel(), num_columns=columns, per_matrix=rows,
             stride_e=x.stride(0) if lead else 0, stride_row=x.stride(-2), stride_column=x.stride(-1)),
        dict(BLOCK_R=ROWS, BLOCK_C=COLUMNS), warps=4, stages=2, label="exponents"))
    return out


def narrowest(name: str | None) -> int:
    """The least step of the contraction: tl.dot's, for the operands of a format."""
    return 16 if name is None else 32


def format_constants(name: str | None) -> dict[str, object]:
    """The constants FORMAT, NARROW and WIDE. Triton's interpreter multiplies bfloat16 wrongly: float32 there."""
    interpreted = not isinstance(exponents_kernel, JITFunction)
    return dict(FORMAT=name or "none", NARROW=tl.float8e4nv, WIDE=tl.float32 if interpreted else tl.bfloat16)
