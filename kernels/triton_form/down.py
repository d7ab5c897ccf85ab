"""Sorted rows times one expert's matrix, D wide: the down-projection, and dX from dH. Then the sum over a token's
slots.

With one slot a token the rows are scattered straight to their tokens. With more, a panel of columns at a time, each row
is written once, and a second kernel sums a token's rows in slot order: no atomics, so the same bits run for run, and no
temporary of S x D. More panels would make the temporary smaller and read the left side more often.
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moebius.kernels.routing import invert
from moebius.kernels.triton_form.configs import GROUP, choose
from moebius.kernels.triton_form.formats import exponents, format_constants, load_exponents, narrowest
from moebius.kernels.triton_form.launch import Launch, describe, dot_precision, fit_block, submit
from moebius.kernels.triton_form.product import product
from moebius.kernels.triton_form.tiles import grid_of, make_tiles, place, turns

COMBINE_TOKENS, COMBINE_WIDTH = 16, 256
PANELS = 2  # the temporary of a sum is half of S x D; with four, `down` falls below an H100's balance (roofline.py)


@triton.jit
def down_kernel(left, matrix, bias, weight, out, order, tile_expert, tile_row, offsets,
                k_left, k_matrix, num_tiles, num_columns, num_experts, size_k, size_d,
                left_row, left_col, w_e, w_k, w_d, bias_e, bias_d, weight_row, weight_col, k_e, k_d, top_k,
                BIASED: tl.constexpr, WEIGHTED: tl.constexpr, SCATTER: tl.constexpr, K_LAST: tl.constexpr,
                LEFT_DESCRIBED: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr,
                PRECISION: tl.constexpr, FORMAT: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
                GROUP: tl.constexpr, PERSISTENT: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    for turn in range(turns(num_tiles * num_columns, PERSISTENT)):
        tile, column = place(turn, num_tiles, num_columns, GROUP)
        expert = tl.load(tile_expert + tile)
        if expert < num_experts:
            first_row = tl.load(tile_row + tile)
            row = first_row + tl.arange(0, BLOCK_M)
            row_ok = row < tl.load(offsets + expert + 1)
            n0 = column * BLOCK_N
            n = n0 + tl.arange(0, BLOCK_N)
            n_ok = n < size_d
            k_rows = load_exponents(k_left + row, row_ok, FORMAT)
            k_columns = load_exponents(k_matrix + expert.to(tl.int64) * k_e + n * k_d, n_ok, FORMAT)
            total = product(left, row, row_ok, left_row, left_col, first_row, matrix, expert, w_e, w_k, w_d, n0,
                            size_k, size_d, k_rows, k_columns, LEFT_DESCRIBED, DESCRIBED, K_LAST, EVEN_K, FORMAT,
                            NARROW, WIDE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
            if BIASED:
                at = bias + expert.to(tl.int64) * bias_e + n * bias_d
                total += tl.load(at, mask=n_ok, other=0.0).to(tl.float32)[None, :]
            slot = row
            if SCATTER or WEIGHTED:
                slot = tl.load(order + row, mask=row_ok, other=0)
            if WEIGHTED:
                at = weight + (slot // top_k).to(tl.int64) * weight_row + (slot % top_k) * weight_col
                total *= tl.load(at, mask=row_ok, other=0.0).to(tl.float32)[:, None]
            target = row
            if SCATTER:
                target = slot
            tl.store(out + target.to(tl.int64)[:, None] * size_d + n[None, :], total.to(out.dtype.element_ty),
                     mask=row_ok[:, None] & n_ok[None, :])


@triton.jit
def combine_kernel(rows, inverse, offsets, out, num_tokens, num_experts, size_d, out_row, TOP_K: tl.constexpr,
                   BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token_ok, d_ok = token < num_tokens, d < size_d
    real_rows = tl.load(offsets + num_experts)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in range(TOP_K):
        row = tl.load(inverse + token.to(tl.int64) * TOP_K + k, mask=token_ok, other=0)
        ok = token_ok & (row < real_rows)
        at = rows + row.to(tl.int64)[:, None] * size_d + d[None, :]
        total += tl.load(at, mask=ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64)[:, None] * out_row + d[None, :], total.to(out.dtype.element_ty),
             mask=token_ok[:, None] & d_ok[None, :])


def combine(rows_SC: Tensor, inverse_S: Tensor, offsets: Tensor, top_k: int, out_TC: Tensor) -> None:
    """out[t] = the sum of token t's rows, over its real slots, in slot order. out_TC: columns of a larger tensor."""
    tokens, width = out_TC.shape
    block_t = min(COMBINE_TOKENS, triton.next_power_of_2(tokens))
    block_d = min(COMBINE_WIDTH, triton.next_power_of_2(width))
    submit(Launch(
        combine_kernel, (triton.cdiv(tokens, block_t), triton.cdiv(width, block_d)),
        dict(rows=rows_SC, inverse=inverse_S, offsets=offsets, out=out_TC, num_tokens=tokens,
             num_experts=offsets.shape[0] - 1, size_d=width, out_row=out_TC.stride(0)),
        dict(TOP_K=top_k, BLOCK_T=block_t, BLOCK_D=block_d), warps=4, stages=2, label="combine"))


def panel_width(width: int, block_n: int) -> int:
    """Columns of a panel: whole blocks."""
    return triton.cdiv(triton.cdiv(width, PANELS), block_n) * block_n


def project_down(left_SP: Tensor, matrix_EPD: Tensor, bias_ED: Tensor | None, weight_TK: Tensor | None,
                 order_S: Tensor, offsets: Tensor, top_k: int, label: str,
                 name: str | None = None) -> Tensor:
    """out[t] = sum over t's rows r of weight * (left[r] @ matrix[e] + bias[e]); left is in sorted order. [T, D].

    matrix_EPD: [E, P, D] with any strides (a transposed view of down, or gate_up as it is). name: of the format.
    """
    slots, inner = left_SP.shape
    num_experts, _, width = matrix_EPD.shape
    config, problem = choose(label, left_SP.dtype, slots, num_experts, inner, width, name, left_SP.device)
    block_m = fit_block(slots, config.block_m)
    block_n, block_k = fit_block(width, config.block_n), fit_block(inner, config.block_k, narrowest(name))
    tiles = make_tiles(offsets, slots, block_m)
    left_described = describe(left_SP, [block_m, block_k])
    scatter = top_k == 1
    bias = left_SP.new_empty(0, width) if bias_ED is None else bias_ED
    weight = left_SP.new_empty(0, 1) if weight_TK is None else weight_TK

    k_left, k_matrix_ED = exponents(left_SP, name), exponents(matrix_EPD.transpose(1, 2), name)

    def launch(matrix: Tensor, bias: Tensor, k_matrix: Tensor, out: Tensor) -> None:
        k_last = matrix.stride(1) == 1
        described = describe(matrix.transpose(1, 2), [1, block_n, block_k]) if k_last else describe(
            matrix, [1, block_k, block_n])
        columns = triton.cdiv(matrix.shape[2], block_n)
        submit(Launch(
            down_kernel, grid_of(tiles, columns, config.waves),
            dict(left=left_described or left_SP, matrix=described or matrix, bias=bias, weight=weight, out=out,
                 order=order_S, tile_expert=tiles.expert, tile_row=tiles.row, offsets=offsets,
                 k_left=k_left, k_matrix=k_matrix, num_tiles=tiles.limit,
                 num_columns=columns, num_experts=num_experts, size_k=inner, size_d=matrix.shape[2],
                 left_row=left_SP.stride(0), left_col=left_SP.stride(1), w_e=matrix.stride(0),
                 w_k=matrix.stride(1), w_d=matrix.stride(2), bias_e=bias.stride(0), bias_d=bias.stride(1),
                 weight_row=weight.stride(0), weight_col=weight.stride(1), k_e=k_matrix.stride(0),
                 k_d=k_matrix.stride(1), top_k=top_k),
            dict(BIASED=bias_ED is not None, WEIGHTED=weight_TK is not None, SCATTER=scatter, K_LAST=k_last,
                 LEFT_DESCRIBED=left_described is not None, DESCRIBED=described is not None,
                 EVEN_K=inner % block_k == 0, PRECISION=dot_precision(left_SP.dtype), GROUP=GROUP,
                 PERSISTENT=config.waves > 0,
                 **format_constants(name),
                 BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k),
            config.warps, config.stages, flops=2 * slots * inner * matrix.shape[2], label=label,
            problem=problem))

    if scatter:
        # Sentinel slots are not written: where rows go straight to tokens, theirs must be zero.
        out_TD = left_SP.new_zeros(slots, width)
        launch(matrix_EPD, bias, k_matrix_ED, out_TD)
        return out_TD
    out_TD = left_SP.new_empty(slots // top_k, width)
    inverse_S = invert(order_S)
    panel = panel_width(width, block_n)
    rows = left_SP.new_empty(slots * min(panel, width))
    for low in range(0, width, panel):
        high = min(low + panel, width)
        rows_SC = rows[: slots * (high - low)].view(slots, high - low)
        launch(matrix_EPD[:, :, low:high], bias[:, low:high], k_matrix_ED[:, low:high], rows_SC)
        combine(rows_SC, inverse_S, offsets, top_k, out_TD[:, low:high])
    return out_TD
