"""First GEMM: tokens gathered in its loads, bias and gated activation in its epilogue. Writes H (as it is, or packed
in MXFP8), A or both."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebius.kernels.activations import split_gate
from moebius.kernels.contract import Options, Weights
from moebius.kernels.quantize import pack, packed_width
from moebius.kernels.triton_form.activations import gate_functions
from moebius.kernels.triton_form.configs import GROUP, choose, epilogue_parts
from moebius.kernels.triton_form.formats import (
    exponents,
    finish_scales,
    format_constants,
    load_exponents,
    multiply,
    narrowest,
)
from moebius.kernels.triton_form.gating import cut, store_h
from moebius.kernels.triton_form.launch import Launch, describe, dot_precision, fit_block, submit
from moebius.kernels.triton_form.packing import fused_parts, store_packed
from moebius.kernels.triton_form.product import load_matrix, load_rows
from moebius.kernels.triton_form.tiles import grid_of, make_tiles, place, turns


@triton.jit
def finish(gate, up, row, row_ok, n0, size_n, bias_gate, bias_up, bias_n, h, a, h_row, GATE: tl.constexpr,
           BIASED: tl.constexpr, KEEP_H: tl.constexpr, KEEP_A: tl.constexpr, VALUE: tl.constexpr,
           WIDTH: tl.constexpr):
    """The epilogue over WIDTH columns from n0: bias, H and A."""
    n = n0 + tl.arange(0, WIDTH)
    n_ok = n < size_n
    row64 = row.to(tl.int64)[:, None]
    if BIASED:
        gate += tl.load(bias_gate + n * bias_n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        if GATE != "none":
            up += tl.load(bias_up + n * bias_n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    if KEEP_H:
        if h.dtype.element_ty == tl.uint8:
            store_packed(h, gate, up, row64, row_ok, n0, size_n, h_row, a.dtype.element_ty, GATE, WIDTH)
        else:
            store_h(h, gate, up, row64, row_ok, n0, size_n, GATE, WIDTH)
    if KEEP_A:
        value = VALUE(gate, up)
        at = a + row64 * size_n + n[None, :]
        tl.store(at, value.to(a.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :])


@triton.jit
def finish_halves(gate, up, row, row_ok, n0, size_n, bias_gate, bias_up, bias_n, h, a, h_row, GATE: tl.constexpr,
                  BIASED: tl.constexpr, KEEP_H: tl.constexpr, KEEP_A: tl.constexpr, VALUE: tl.constexpr,
                  ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """finish, one half of the columns after the other."""
    HALF: tl.constexpr = WIDTH // 2
    gate_low, gate_high = cut(gate, ROWS, WIDTH)
    up_low, up_high = cut(up, ROWS, WIDTH)
    finish(gate_low, up_low, row, row_ok, n0, size_n, bias_gate, bias_up, bias_n, h, a, h_row, GATE, BIASED, KEEP_H,
           KEEP_A, VALUE, HALF)
    finish(gate_high, up_high, row, row_ok, n0 + HALF, size_n, bias_gate, bias_up, bias_n, h, a, h_row, GATE, BIASED,
           KEEP_H, KEEP_A, VALUE, HALF)


@triton.jit
def up_kernel(x, w_gate, w_up, bias_gate, bias_up, h, a, order, tile_expert, tile_row, offsets,
              k_x, k_gate, k_up, num_tiles, num_columns, num_experts, top_k, size_d, size_n,
              x_row, x_col, h_row, w_e, w_n, w_d, bias_e, bias_n, k_e, k_n,
              GATE: tl.constexpr, BIASED: tl.constexpr, KEEP_H: tl.constexpr, KEEP_A: tl.constexpr,
              VALUE: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
              FORMAT: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
              PERSISTENT: tl.constexpr, PARTS: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    for turn in range(turns(num_tiles * num_columns, PERSISTENT)):
        tile, column = place(turn, num_tiles, num_columns, GROUP)
        expert = tl.load(tile_expert + tile)
        if expert < num_experts:
            first_row = tl.load(tile_row + tile)
            row = first_row + tl.arange(0, BLOCK_M)
            row_ok = row < tl.load(offsets + expert + 1)
            token = tl.load(order + row, mask=row_ok, other=0) // top_k
            n0 = column * BLOCK_N
            gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            n = n0 + tl.arange(0, BLOCK_N)
            at = expert.to(tl.int64) * k_e + n * k_n
            k_rows = load_exponents(k_x + token, row_ok, FORMAT)
            k_columns_gate = load_exponents(k_gate + at, n < size_n, FORMAT)
            k_columns_up = load_exponents(k_up + at, n < size_n, FORMAT)
            for k0 in range(0, size_d, BLOCK_K):
                rows = load_rows(x, token, row_ok, x_row, x_col, first_row, k0, size_d, False, EVEN_K, BLOCK_M, BLOCK_K)
                w = load_matrix(w_gate, expert, w_e, w_d, w_n, k0, n0, size_d, size_n,
                                DESCRIBED, True, EVEN_K, BLOCK_K, BLOCK_N)
                gate = multiply(rows, w, gate, k_rows, k_columns_gate, FORMAT, True, NARROW, WIDE, PRECISION,
                                BLOCK_M, BLOCK_N, BLOCK_K)
                if GATE != "none":
                    w = load_matrix(w_up, expert, w_e, w_d, w_n, k0, n0, size_d, size_n,
                                    DESCRIBED, True, EVEN_K, BLOCK_K, BLOCK_N)
                    up = multiply(rows, w, up, k_rows, k_columns_up, FORMAT, True, NARROW, WIDE, PRECISION,
                                  BLOCK_M, BLOCK_N, BLOCK_K)
            gate = finish_scales(gate, k_rows, k_columns_gate, FORMAT)
            up = finish_scales(up, k_rows, k_columns_up, FORMAT)
            b_gate = bias_gate + expert.to(tl.int64) * bias_e
            b_up = bias_up + expert.to(tl.int64) * bias_e
            if PARTS == 1:
                finish(gate, up, row, row_ok, n0, size_n, b_gate, b_up, bias_n, h, a, h_row, GATE, BIASED, KEEP_H,
                       KEEP_A, VALUE, BLOCK_N)
            elif PARTS == 2:
                finish_halves(gate, up, row, row_ok, n0, size_n, b_gate, b_up, bias_n, h, a, h_row, GATE, BIASED,
                              KEEP_H, KEEP_A, VALUE, BLOCK_M, BLOCK_N)
            else:
                HALF: tl.constexpr = BLOCK_N // 2
                gate_low, gate_high = cut(gate, BLOCK_M, BLOCK_N)
                up_low, up_high = cut(up, BLOCK_M, BLOCK_N)
                finish_halves(gate_low, up_low, row, row_ok, n0, size_n, b_gate, b_up, bias_n, h, a, h_row, GATE,
                              BIASED, KEEP_H, KEEP_A, VALUE, BLOCK_M, HALF)
                finish_halves(gate_high, up_high, row, row_ok, n0 + HALF, size_n, b_gate, b_up, bias_n, h, a, h_row,
                              GATE, BIASED, KEEP_H, KEEP_A, VALUE, BLOCK_M, HALF)


def project_up(x_TD: Tensor, weights: Weights, order_S: Tensor, offsets: Tensor, top_k: int, options: Options,
               keep_h: bool, keep_a: bool) -> tuple[Tensor, Tensor]:
    """(h_SM, a_SN); one that is not kept has no rows. With save="fp8" H is packed: uint8 [S, packed_width(M)], by
    torch's operators where its blocks do not lie whole in a tile. Rows of sentinel slots are not written."""
    gated = options.gate != "none"
    slots, width = order_S.shape[0], x_TD.shape[1]
    num_experts, width_h, _ = weights.gate_up_E2ND.shape
    narrow = width_h // 2 if gated else width_h
    a_SN = x_TD.new_empty(slots if keep_a else 0, narrow)
    name = options.format("up")
    packed = keep_h and options.save == "fp8"
    config, problem = choose(("up" if gated else "up_ungated") + "_packed" * packed, x_TD.dtype, slots, num_experts,
                             width, narrow, name, x_TD.device)
    block_m = fit_block(slots, config.block_m)
    block_n, block_k = fit_block(narrow, config.block_n), fit_block(width, config.block_k, narrowest(name))
    tiles = make_tiles(offsets, slots, block_m)
    parts = min(4 if packed else 2, epilogue_parts(block_n))
    fused = fused_parts(options.gate, narrow, block_n, parts) if packed else 0
    h_SM = x_TD.new_empty(slots if keep_h else 0, packed_width(width_h) if fused else width_h,
                          dtype=torch.uint8 if fused else None)

    def halves(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        first, second = split_gate(tensor, options.gate, dim)
        return first, first if second is None else second

    w_gate, w_up = halves(weights.gate_up_E2ND, 1)
    biased = weights.gate_up_bias_EM is not None
    bias_gate, bias_up = halves(x_TD.new_empty(0, width_h) if weights.gate_up_bias_EM is None
                                else weights.gate_up_bias_EM, 1)
    k_gate, k_up = halves(exponents(weights.gate_up_E2ND, name), 1)
    block = [1, block_n, block_k]
    described_gate, described_up = describe(w_gate, block), describe(w_up, block)
    described = described_gate is not None and described_up is not None
    columns = triton.cdiv(narrow, block_n)
    submit(Launch(
        up_kernel, grid_of(tiles, columns, config.waves),
        dict(x=x_TD, w_gate=described_gate if described else w_gate, w_up=described_up if described else w_up,
             bias_gate=bias_gate, bias_up=bias_up, h=h_SM, a=a_SN, order=order_S,
             tile_expert=tiles.expert, tile_row=tiles.row, offsets=offsets, k_x=exponents(x_TD, name),
             k_gate=k_gate, k_up=k_up, num_tiles=tiles.limit,
             num_columns=columns, num_experts=num_experts, top_k=top_k, size_d=width, size_n=narrow,
             x_row=x_TD.stride(0), x_col=x_TD.stride(1), h_row=h_SM.stride(0), w_e=w_gate.stride(0),
             w_n=w_gate.stride(1), w_d=w_gate.stride(2), bias_e=bias_gate.stride(0), bias_n=bias_gate.stride(1),
             k_e=k_gate.stride(0), k_n=k_gate.stride(1)),
        dict(GATE=options.gate, BIASED=biased, KEEP_H=keep_h, KEEP_A=keep_a,
             VALUE=gate_functions(options.activation, options.gate)[0],
             DESCRIBED=described, EVEN_K=width % block_k == 0, PRECISION=dot_precision(x_TD.dtype), GROUP=GROUP,
             PERSISTENT=config.waves > 0, **format_constants(name),
             PARTS=fused or parts, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k),
        config.warps, config.stages, flops=2 * slots * width * width_h, label="up", problem=problem))
    return pack(h_SM) if packed and not fused else h_SM, a_SN
