"""Weight gradients: for each expert, the sum over its rows of an outer product, one side gathered by token in the
loads.

A program owns one tile of one expert's gradient and walks that expert's rows, whose number it reads on the device. An
expert without rows writes zeros.
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moebius.kernels.triton_form.configs import choose
from moebius.kernels.triton_form.formats import format_constants, multiply, narrowest
from moebius.kernels.triton_form.launch import Launch, dot_precision, fit_block, submit
from moebius.kernels.triton_form.product import load_rows

SUM_COLUMNS, SUM_ROWS = 64, 64


@triton.jit
def load_tokens(order, row, stop, top_k):
    """The tokens of sorted rows; 0 from stop on."""
    return tl.load(order + row, mask=row < stop, other=0) // top_k


@triton.jit
def weight_grad_kernel(left, right, out, order, offsets, top_k, num_columns, num_blocks, size_p, size_q,
                       left_row, left_col, right_row, right_col,
                       LEFT_GATHERED: tl.constexpr, RIGHT_GATHERED: tl.constexpr, EVEN_P: tl.constexpr,
                       EVEN_Q: tl.constexpr, PRECISION: tl.constexpr, FORMAT: tl.constexpr,
                       NARROW: tl.constexpr, WIDE: tl.constexpr,
                       BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr):
    pid = tl.program_id(0)
    expert = pid // num_blocks
    p0 = (pid % num_blocks) // num_columns * BLOCK_P
    q0 = (pid % num_blocks) % num_columns * BLOCK_Q
    start, stop = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    token = load_tokens(order, start + tl.arange(0, BLOCK_S), stop, top_k)
    for s0 in range(start, stop, BLOCK_S):
        row = s0 + tl.arange(0, BLOCK_S)
        row_ok = row < stop
        left_at, right_at = row, row
        if LEFT_GATHERED:
            left_at = token
        if RIGHT_GATHERED:
            right_at = token
        a = load_rows(left, left_at, row_ok, left_row, left_col, 0, p0, size_p, False, EVEN_P, BLOCK_S, BLOCK_P)
        b = load_rows(right, right_at, row_ok, right_row, right_col, 0, q0, size_q, False, EVEN_Q, BLOCK_S, BLOCK_Q)
        # One step ahead: tokens read in the step that needs them would leave rows under way for one step only. With
        # two the compiler (Triton 3.7) no longer reads anything ahead.
        token = load_tokens(order, row + BLOCK_S, stop, top_k)
        total = multiply(a.T, b, total, 0, 0, FORMAT, False, NARROW, WIDE, PRECISION, BLOCK_P, BLOCK_Q, BLOCK_S)
    p, q = p0 + tl.arange(0, BLOCK_P), q0 + tl.arange(0, BLOCK_Q)
    at = out + expert.to(tl.int64) * size_p * size_q + p.to(tl.int64)[:, None] * size_q + q[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(p < size_p)[:, None] & (q < size_q)[None, :])


@triton.jit
def row_sum_kernel(rows, weight, out, order, offsets, top_k, size_c, row_stride, col_stride, weight_row, weight_col,
                   GATHERED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    expert, c0 = tl.program_id(0), tl.program_id(1) * BLOCK_C
    start, stop = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for s0 in range(start, stop, BLOCK_S):
        row = s0 + tl.arange(0, BLOCK_S)
        row_ok = row < stop
        slot = tl.load(order + row, mask=row_ok, other=0)
        at = row
        if GATHERED:
            at = slot // top_k
        block = load_rows(rows, at, row_ok, row_stride, col_stride, 0, c0, size_c, False, False,
                          BLOCK_S, BLOCK_C).to(tl.float32)
        if WEIGHTED:
            where = weight + (slot // top_k).to(tl.int64) * weight_row + (slot % top_k) * weight_col
            block *= tl.load(where, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(block, 0)
    c = c0 + tl.arange(0, BLOCK_C)
    tl.store(out + expert.to(tl.int64) * size_c + c, total.to(out.dtype.element_ty), mask=c < size_c)


def weight_grad(left: Tensor, right: Tensor, order_S: Tensor, offsets: Tensor, top_k: int, *,
                left_gathered: bool = False, right_gathered: bool = False, name: str | None = None) -> Tensor:
    """out[e] = left[rows of e].T @ right[rows of e], [E, P, Q]. A gathered side is [T, ...], read at each row's
    token. name: of the format."""
    num_experts = offsets.shape[0] - 1
    size_p, size_q = left.shape[1], right.shape[1]
    slots = order_S.shape[0]
    config, problem = choose("weight_grad", left.dtype, slots, num_experts, size_p, size_q, name, left.device)
    block_p, block_q = fit_block(size_p, config.block_m), fit_block(size_q, config.block_n)
    block_s = fit_block(slots, config.block_k, narrowest(name))
    out = left.new_empty(num_experts, size_p, size_q)
    columns = triton.cdiv(size_q, block_q)
    blocks = triton.cdiv(size_p, block_p) * columns
    submit(Launch(
        weight_grad_kernel, (num_experts * blocks,),
        dict(left=left, right=right, out=out, order=order_S, offsets=offsets, top_k=top_k, num_columns=columns,
             num_blocks=blocks, size_p=size_p, size_q=size_q, left_row=left.stride(0), left_col=left.stride(1),
             right_row=right.stride(0), right_col=right.stride(1)),
        dict(LEFT_GATHERED=left_gathered, RIGHT_GATHERED=right_gathered, EVEN_P=size_p % block_p == 0,
             EVEN_Q=size_q % block_q == 0, PRECISION=dot_precision(left.dtype), **format_constants(name),
             BLOCK_P=block_p, BLOCK_Q=block_q, BLOCK_S=block_s),
        config.warps, config.stages, flops=2 * slots * size_p * size_q,
        label="weight_grad_gathered_left" if left_gathered else "weight_grad_gathered_right", problem=problem))
    return out


def row_sum(rows: Tensor, weight_TK: Tensor | None, order_S: Tensor, offsets: Tensor, top_k: int, *,
            gathered: bool = False) -> Tensor:
    """out[e] = the sum over e's rows, each times its routing weight where given, [E, C]: bias gradients."""
    num_experts, size_c = offsets.shape[0] - 1, rows.shape[1]
    out = rows.new_empty(num_experts, size_c)
    weight = rows.new_empty(0, 1) if weight_TK is None else weight_TK
    block_c = fit_block(size_c, SUM_COLUMNS)
    submit(Launch(
        row_sum_kernel, (num_experts, triton.cdiv(size_c, block_c)),
        dict(rows=rows, weight=weight, out=out, order=order_S, offsets=offsets, top_k=top_k, size_c=size_c,
             row_stride=rows.stride(0), col_stride=rows.stride(1), weight_row=weight.stride(0),
             weight_col=weight.stride(1)),
        dict(GATHERED=gathered, WEIGHTED=weight_TK is not None, BLOCK_S=SUM_ROWS, BLOCK_C=block_c),
        warps=4, stages=2, label="row_sum"))
    return out
