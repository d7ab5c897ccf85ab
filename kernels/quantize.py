"""MXFP8, in torch and exactly: blocks of 32 elements along the last axis, each with a power of two as its scale.

OCP Microscaling Formats v1.0 (E4M3 elements, E8M0 scales), but for the scale's rounding: up, so that the largest
element of a block is at most E4M3's 448 and nothing saturates (Mishra et al. 2025, "Recipes for Pre-training LLMs with
MXFP8"). An element is rounded to nearest even once, from float32.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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


def pack(x: Tensor) -> Tensor:
    """[rows, width] of any float dtype -> uint8 [rows, packed_width(width)]: the elements, then the scales.

    A block in which something is not finite gets the scale that says so, and unpacks to NaN as a whole.
    """
    rows, width = x.shape
    padded = functional.pad(x.to(torch.float32), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = padded.abs().amax(-1)
    finite = largest.isfinite()  # amax hands NaN on
    k = scale_exponents(torch.where(finite, largest, 0))
    # two steps: 2**-k alone may lie outside float32
    half = k // 2
    scaled = torch.ldexp(torch.ldexp(padded, -half[..., None]), (half - k)[..., None])
    elements = scaled.masked_fill(~finite[..., None], 0).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.where(finite, k + BIAS, NAN_SCALE).to(torch.uint8)
    return torch.cat([elements.flatten(-2)[:, :width], scales], -1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What :func:`pack` packed: [rows, width] in dtype."""
    elements = functional.pad(packed[:, :width], (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = packed[:, width:]
    k = scales.to(torch.int32) - BIAS
    half = k // 2
    values = elements.view(torch.float8_e4m3fn).to(torch.float32)
    values = torch.ldexp(torch.ldexp(values, half[..., None]), (k - half)[..., None])
    values = values.masked_fill((scales == NAN_SCALE)[..., None], float("nan"))
    return values.flatten(-2)[:, :width].to(dtype)
