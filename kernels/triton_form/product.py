"""The inner loop that the grouped kernels share: rows, gathered or in order, times one expert's matrix."""
from __future__ import annotations

import triton
import triton.language as tl

from moebius.kernels.triton_form.formats import finish_scales, multiply


@triton.jit
def load_rows(left, rows, rows_ok, stride_row, stride_col, first_row, k0, size_k,
              DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of left from column k0: rows by number, or consecutive ones by descriptor."""
    if DESCRIBED:
        return left.load([first_row, k0])
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        at = left + rows.to(tl.int64)[:, None] * stride_row + k[None, :] * stride_col
        if EVEN_K:
            return tl.load(at, mask=rows_ok[:, None], other=0.0)
        else:
            return tl.load(at, mask=rows_ok[:, None] & (k < size_k)[None, :], other=0.0)


@triton.jit
def load_matrix(matrix, expert, stride_e, stride_k, stride_n, k0, n0, size_k, size_n,
                DESCRIBED: tl.constexpr, K_LAST: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of one expert's matrix. K_LAST: the contracted axis is the last in memory order."""
    if DESCRIBED:
        if K_LAST:
            return matrix.load([expert, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
        else:
            return matrix.load([expert, k0, n0]).reshape(BLOCK_K, BLOCK_N)
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        n = n0 + tl.arange(0, BLOCK_N)
        at = matrix + expert.to(tl.int64) * stride_e + k[:, None] * stride_k + n[None, :] * stride_n
        if EVEN_K:
            return tl.load(at, mask=(n < size_n)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(k < size_k)[:, None] & (n < size_n)[None, :], other=0.0)


@triton.jit
def product(left, rows, rows_ok, stride_row, stride_col, first_row, matrix, expert, stride_e, stride_k, stride_n, n0,
            size_k, size_n, k_rows, k_columns, LEFT_DESCRIBED: tl.constexpr, MATRIX_DESCRIBED: tl.constexpr,
            K_LAST: tl.constexpr, EVEN_K: tl.constexpr, FORMAT: tl.constexpr, NARROW: tl.constexpr,
            WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):
    """float32 [BLOCK_M, BLOCK_N]: rows of left times columns n0.. of the expert's matrix, in a format (formats.py).

    k_rows [BLOCK_M], k_columns [BLOCK_N]: the exponents that "fp8" has.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, size_k, BLOCK_K):
        a = load_rows(left, rows, rows_ok, stride_row, stride_col, first_row, k0, size_k,
                      LEFT_DESCRIBED, EVEN_K, BLOCK_M, BLOCK_K)
        b = load_matrix(matrix, expert, stride_e, stride_k, stride_n, k0, n0, size_k, size_n,
                        MATRIX_DESCRIBED, K_LAST, EVEN_K, BLOCK_K, BLOCK_N)
        total = multiply(a, b, total, k_rows, k_columns, FORMAT, True, NARROW, WIDE, PRECISION,
                         BLOCK_M, BLOCK_N, BLOCK_K)
    return finish_scales(total, k_rows, k_columns, FORMAT)
