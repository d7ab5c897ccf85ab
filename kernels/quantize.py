"""E4M3 in blocks with powers of two as scales, in torch and exactly: H packed in MXFP8, and operands of GEMMs rounded.

MXFP8: blocks of 32 elements along the last axis. OCP Microscaling Formats v1.0 (E4M3 elements, E8M0 scales), but for
the scale's rounding: up, so that the largest element of a block is at most E4M3's 448 and nothing saturates (Mishra et
al. 2025, "Recipes for Pre-training LLMs with MXFP8"). An element is rounded to nearest even once, from float32.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moebius.kernels.activations import split_gate
from moebius.kernels.precision import FORMATS

BLOCK = 32
LARGEST = 448.0  # of E4M3: 0.875 * 2**9
BIAS = 127  # of E8M0; 255 is not a number
NAN_SCALE = 255


def packed_width(width: int) -> int:
    """Bytes of a row of ``width`` elements: one each, and one scale a block."""
    return width + (width + BLOCK - 1) // BLOCK


def scale_exponents(largest: Tensor) -> Tensor:
    """The smallest k with largest <= 448 * 2**k, int32, within [-127, 127]; largest: float32, not negative."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1): compared with 448's own, so nothing is rounded
    k = (exponent - 9 + (mantissa > 0.875).to(torch.int32)).clamp(-BIAS, BIAS)
    return torch.where(largest == 0, -BIAS, k)  # frexp(0) is 0 * 2**0


def times_power(x: Tensor, k: Tensor) -> Tensor:
    """x * 2**k in float32, k: int32 in [-127, 127]. In two steps: 2**k alone may lie outside float32."""
    half = k // 2
    first, second = (((part + BIAS) << 23).view(torch.float32) for part in (half, k - half))
    return x * first * second


def round_blocks(x_RC: Tensor, rows: int, columns: int) -> Tensor:
    """[R, C] rounded to E4M3 in blocks of rows x columns (0 columns: the whole row), each with its power of two.

    In float32 (float64 for float64), which holds every such value. A block with something not finite is NaN.
    """
    height, width = x_RC.shape
    columns = columns or max(1, width)
    padded = functional.pad(x_RC.to(torch.float32), (0, -width % columns, 0, -height % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [R / rows, rows, C / columns, columns]
    largest = tiles.abs().amax((1, 3), keepdim=True)
    k = scale_exponents(largest.nan_to_num(0, 0))
    rounded = times_power(times_power(tiles, -k).to(torch.float8_e4m3fn).to(torch.float32), k)
    rounded = rounded.masked_fill(~largest.isfinite(), float("nan"))
    return rounded.flatten(2).flatten(0, 1)[:height, :width].to(torch.promote_types(x_RC.dtype, torch.float32))


def round_left(rows_SK: Tensor, name: str) -> Tensor:
    """The left operand of a GEMM that contracts over its last axis."""
    return round_blocks(rows_SK, *FORMATS[name].rows)


def round_matrix(matrix_KN: Tensor, name: str) -> Tensor:
    """An expert's weights, contracted over their first axis."""
    return round_blocks(matrix_KN.T, *FORMATS[name].matrix).T


def round_gate_up(gate_up_MD: Tensor, gate: str, name: str) -> Tensor:
    """An expert's first weights, contracted over D: [M, D]. Blocks begin anew at the up half, wherever it lies."""
    halves = split_gate(gate_up_MD, gate, 0)
    rounded = gate_up_MD.new_empty(gate_up_MD.shape, dtype=torch.promote_types(gate_up_MD.dtype, torch.float32))
    for half, target in zip(halves, split_gate(rounded, gate, 0), strict=True):
        if half is not None and target is not None:
            target.copy_(round_blocks(half, *FORMATS[name].matrix))
    return rounded


def round_outer(rows_SC: Tensor, name: str) -> Tensor:
    """One operand of a weight gradient, which contracts over one expert's rows, the first axis."""
    return round_blocks(rows_SC.T, *FORMATS[name].rows).T


def pack(x: Tensor) -> Tensor:
    """[rows, width] of any float dtype -> uint8 [rows, packed_width(width)]: the elements, then the scales.

    A block in which something is not finite gets the scale that says so, and unpacks to NaN as a whole.
    """
    rows, width = x.shape
    padded = functional.pad(x.to(torch.float32), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = padded.abs().amax(-1)
    finite = largest.isfinite()  # amax hands NaN on
    k = scale_exponents(torch.where(finite, largest, 0))
    scaled = times_power(padded, -k[..., None])
    elements = scaled.masked_fill(~finite[..., None], 0).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.where(finite, k + BIAS, NAN_SCALE).to(torch.uint8)
    return torch.cat([elements.flatten(-2)[:, :width], scales], -1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What :func:`pack` packed: [rows, width] in dtype, contiguous."""
    elements = functional.pad(packed[:, :width], (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = packed[:, width:]
    k = scales.to(torch.int32) - BIAS
    values = times_power(elements.view(torch.float8_e4m3fn).to(torch.float32), k[..., None])
    values = values.masked_fill((scales == NAN_SCALE)[..., None], float("nan"))
    return values.flatten(-2)[:, :width].to(dtype).contiguous()
