"""One pass of backward: dA' = dO @ down[e] with dO gathered, and in its epilogue A from H, dH, s*A and dS = <dA',
A>. H is read as it is, or packed in MXFP8."""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebius.kernels.contract import Needs, Options, Weights
from moebius.kernels.quantize import unpack
from moebius.kernels.triton_form.activations import gate_functions
from moebius.kernels.triton_form.configs import GROUP, choose, epilogue_parts
from moebius.kernels.triton_form.formats import exponents, format_constants, load_exponents, narrowest
from moebius.kernels.triton_form.gating import cut, load_h, store_h
from moebius.kernels.triton_form.launch import Launch, describe, dot_precision, fit_block, submit
from moebius.kernels.triton_form.packing import fused_parts, load_packed
from moebius.kernels.triton_form.product import load_rows, product
from moebius.kernels.triton_form.tiles import grid_of, make_tiles, place, turns


@triton.jit
def finish(grad_a, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE: tl.constexpr, WEIGHTED: tl.constexpr,
           KEEP_S: tl.constexpr, KEEP_A: tl.constexpr, KEEP_DH: tl.constexpr, GRADIENTS: tl.constexpr,
           WIDTH: tl.constexpr):
    """The epilogue over WIDTH columns from n0: stores s*A and dH, returns the columns' part of dS [rows]."""
    n = n0 + tl.arange(0, WIDTH)
    ok = row_ok[:, None] & (n < size_n)[None, :]
    row64 = row.to(tl.int64)[:, None]
    if h.dtype.element_ty == tl.uint8:
        gate, up = load_packed(h, row64, row_ok, n0, size_n, h_row, grad_h.dtype.element_ty, GATE, WIDTH)
    else:
        gate, up = load_h(h, row64, row_ok, n0, size_n, GATE, WIDTH)
    full, d_gate, d_up = GRADIENTS(gate, up)
    part = tl.zeros_like(scale)
    if KEEP_S:
        # f(0) may be other than 0 (sigmoid): columns past N are not counted
        part = tl.sum(tl.where(ok, grad_a * full, 0.0), 1)
    if WEIGHTED:
        full *= scale[:, None]
        grad_a *= scale[:, None]
    if KEEP_A:
        tl.store(a + row64 * size_n + n[None, :], full.to(a.dtype.element_ty), mask=ok)
    if KEEP_DH:
        store_h(grad_h, grad_a * d_gate, grad_a * d_up, row64, row_ok, n0, size_n, GATE, WIDTH)
    return part


@triton.jit
def finish_halves(grad_a, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE: tl.constexpr,
                  WEIGHTED: tl.constexpr, KEEP_S: tl.constexpr, KEEP_A: tl.constexpr, KEEP_DH: tl.constexpr,
                  GRADIENTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """finish, one half of the columns after the other."""
    HALF: tl.constexpr = WIDTH // 2
    low, high = cut(grad_a, ROWS, WIDTH)
    part = finish(low, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE, WEIGHTED, KEEP_S, KEEP_A, KEEP_DH,
                  GRADIENTS, HALF)
    return part + finish(high, scale, row, row_ok, n0 + HALF, size_n, h, grad_h, a, h_row, GATE, WEIGHTED, KEEP_S,
                         KEEP_A, KEEP_DH, GRADIENTS, HALF)


@triton.jit
def grad_act_kernel(grad, matrix, bias, weight, h, grad_h, a, grad_s, order, tile_expert, tile_row, offsets,
                    k_grad, k_matrix, num_tiles, num_columns, num_experts, top_k, size_d, size_n,
                    grad_row, grad_col, h_row, w_e, w_d, w_n, bias_e, bias_d, weight_row, weight_col, k_e, k_n,
                    GATE: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, KEEP_S: tl.constexpr,
                    KEEP_A: tl.constexpr, KEEP_DH: tl.constexpr, GRADIENTS: tl.constexpr, K_LAST: tl.constexpr,
                    DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, FORMAT: tl.constexpr,
                    NARROW: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
                    PERSISTENT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):
    for turn in range(turns(num_tiles * num_columns, PERSISTENT)):
        tile, column = place(turn, num_tiles, num_columns, GROUP)
        expert = tl.load(tile_expert + tile)
        if expert < num_experts:
            first_row = tl.load(tile_row + tile)
            row = first_row + tl.arange(0, BLOCK_M)
            row_ok = row < tl.load(offsets + expert + 1)
            slot = tl.load(order + row, mask=row_ok, other=0)
            token = slot // top_k
            n0 = column * BLOCK_N
            n = n0 + tl.arange(0, BLOCK_N)
            k_rows = load_exponents(k_grad + token, row_ok, FORMAT)
            k_columns = load_exponents(k_matrix + expert.to(tl.int64) * k_e + n * k_n, n < size_n, FORMAT)
            grad_a = product(grad, token, row_ok, grad_row, grad_col, first_row, matrix, expert, w_e, w_d, w_n, n0,
                             size_d, size_n, k_rows, k_columns, False, DESCRIBED, K_LAST, EVEN_K, FORMAT, NARROW, WIDE,
                             PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
            scale = tl.full((BLOCK_M,), 1.0, tl.float32)
            if WEIGHTED:
                at = weight + token.to(tl.int64) * weight_row + (slot % top_k) * weight_col
                scale = tl.load(at, mask=row_ok, other=0.0).to(tl.float32)
            partial = tl.zeros((BLOCK_M,), tl.float32)
            if KEEP_S and BIASED:
                if column == 0:
                    for d0 in range(0, size_d, BLOCK_K):
                        d = d0 + tl.arange(0, BLOCK_K)
                        g = load_rows(grad, token, row_ok, grad_row, grad_col, first_row, d0, size_d,
                                      False, EVEN_K, BLOCK_M, BLOCK_K)
                        b = tl.load(bias + expert.to(tl.int64) * bias_e + d * bias_d, mask=d < size_d, other=0.0)
                        partial += tl.sum(g.to(tl.float32) * b.to(tl.float32)[None, :], 1)
            if PARTS == 1:
                partial += finish(grad_a, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE, WEIGHTED, KEEP_S,
                                  KEEP_A, KEEP_DH, GRADIENTS, BLOCK_N)
            elif PARTS == 2:
                partial += finish_halves(grad_a, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE, WEIGHTED,
                                         KEEP_S, KEEP_A, KEEP_DH, GRADIENTS, BLOCK_M, BLOCK_N)
            else:
                HALF: tl.constexpr = BLOCK_N // 2
                low, high = cut(grad_a, BLOCK_M, BLOCK_N)
                partial += finish_halves(low, scale, row, row_ok, n0, size_n, h, grad_h, a, h_row, GATE, WEIGHTED,
                                         KEEP_S, KEEP_A, KEEP_DH, GRADIENTS, BLOCK_M, HALF)
                partial += finish_halves(high, scale, row, row_ok, n0 + HALF, size_n, h, grad_h, a, h_row, GATE,
                                         WEIGHTED, KEEP_S, KEEP_A, KEEP_DH, GRADIENTS, BLOCK_M, HALF)
            if KEEP_S:
                tl.store(grad_s + slot.to(tl.int64) * num_columns + column, partial, mask=row_ok)


class ActivationGradients(NamedTuple):
    """grad_h: dH [S, M]; scaled_a: s*A [S, N]; grad_s: dS [S] in slot order, float32, zero for sentinel slots."""

    grad_h_SM: Tensor
    scaled_a_SN: Tensor
    grad_s_S: Tensor


def grad_activation(grad_TD: Tensor, h_SM: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor,
                    weight_TK: Tensor | None, top_k: int, options: Options, needs: Needs) -> ActivationGradients:
    """dH, s*A and dS in one kernel; those that nothing needs have no rows. h_SM: as it is, or packed (uint8)."""
    slots = order_S.shape[0]
    num_experts, width, narrow = weights.down_EDN.shape
    width_h = weights.gate_up_E2ND.shape[1]
    keep_dh = needs.x or needs.gate_up or needs.gate_up_bias
    name = options.format("grad_act")
    config, problem = choose("grad_act", grad_TD.dtype, slots, num_experts, width, narrow, name, h_SM.device)
    block_m = fit_block(slots, config.block_m)
    block_n, block_k = fit_block(narrow, config.block_n), fit_block(width, config.block_k, narrowest(name))
    tiles = make_tiles(offsets, slots, block_m)
    parts = epilogue_parts(block_n)
    fused = fused_parts(options.gate, narrow, block_n, parts) if h_SM.dtype == torch.uint8 else parts
    if not fused:
        h_SM, fused = unpack(h_SM, width_h, grad_TD.dtype), parts
    columns = triton.cdiv(narrow, block_n)
    grad_h = grad_TD.new_empty(slots if keep_dh else 0, width_h)
    scaled_a = grad_TD.new_empty(slots if needs.down else 0, narrow)
    partials = grad_TD.new_zeros(slots if needs.weight else 0, columns, dtype=torch.float32)
    matrix = weights.down_EDN
    k_last = matrix.stride(1) == 1 and matrix.stride(2) != 1
    described = describe(matrix.transpose(1, 2), [1, block_n, block_k]) if k_last else describe(
        matrix, [1, block_k, block_n])
    bias = grad_TD.new_empty(0, width) if weights.down_bias_ED is None else weights.down_bias_ED
    weight = grad_TD.new_empty(0, 1) if weight_TK is None else weight_TK
    k_matrix = exponents(matrix.transpose(1, 2), name)
    submit(Launch(
        grad_act_kernel, grid_of(tiles, columns, config.waves),
        dict(grad=grad_TD, matrix=described or matrix, bias=bias, weight=weight, h=h_SM, grad_h=grad_h,
             a=scaled_a, grad_s=partials, order=order_S, tile_expert=tiles.expert, tile_row=tiles.row,
             offsets=offsets, k_grad=exponents(grad_TD, name), k_matrix=k_matrix,
             num_tiles=tiles.limit, num_columns=columns, num_experts=num_experts, top_k=top_k,
             size_d=width, size_n=narrow, grad_row=grad_TD.stride(0), grad_col=grad_TD.stride(1),
             h_row=h_SM.stride(0), w_e=matrix.stride(0), w_d=matrix.stride(1), w_n=matrix.stride(2),
             bias_e=bias.stride(0), bias_d=bias.stride(1), weight_row=weight.stride(0), weight_col=weight.stride(1),
             k_e=k_matrix.stride(0), k_n=k_matrix.stride(1)),
        dict(GATE=options.gate, BIASED=weights.down_bias_ED is not None, WEIGHTED=weight_TK is not None,
             KEEP_S=needs.weight, KEEP_A=needs.down, KEEP_DH=keep_dh, K_LAST=k_last,
             GRADIENTS=gate_functions(options.activation, options.gate)[1],
             DESCRIBED=described is not None, EVEN_K=width % block_k == 0, PRECISION=dot_precision(grad_TD.dtype),
             **format_constants(name), GROUP=GROUP, PERSISTENT=config.waves > 0, PARTS=fused,
             BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k),
        config.warps, config.stages, flops=2 * slots * width * narrow, label="grad_act", problem=problem))
    return ActivationGradients(grad_h, scaled_a, partials.sum(1))
