"""Which dtypes are multiplied in float32 on a CPU: those of 16 bits whose products the library takes longer for.

A processor without instructions for a dtype has it multiplied number by number, which takes 4 to 60 times as long as
float32, which holds the same numbers. Others have them and are slower all the same. Which is so is measured, for it is
a matter of processor, library and settings together.
"""
from __future__ import annotations

from functools import cache

import torch

from moebius.kernels.native import panel_work

ENOUGH = 1e-3  # seconds of a product that tells
LARGEST = 1024
SLOWER, MUCH_SLOWER = 1.3, 3.0  # a tie is left to the library; between these two nothing was ever measured but 1.8
NEVER = 2**31 - 1
FEW_ROWS = 32  # of an expert: with fewer it takes longer to widen its weights than is won, where it is but SLOWER
DOT_ROWS = 4  # likewise where it is MUCH_SLOWER, with both operands read along their rows, which even then is fast


@cache  # one answer a process: the same bits run for run
def slowness(dtype: torch.dtype) -> float:
    """How many times as long as in float32 the library's product takes. 1.0 where C does not multiply the dtype."""
    if dtype not in (torch.bfloat16, torch.float16) or not panel_work.multiplies():
        return 1.0

    def seconds(of: torch.dtype) -> float:
        return panel_work.time_product(size, of)

    size = 64
    while size < LARGEST and min(seconds(dtype), seconds(dtype)) < ENOUGH:
        size *= 2
    tries = [(seconds(dtype), seconds(torch.float32)) for _ in range(6)]  # alternating: other load disturbs both
    own, wide = map(min, zip(*tries, strict=True))
    return own / wide


def rows_from(dtype: torch.dtype, dots: bool = False) -> int:
    """So many rows of an expert, or more, are multiplied in float32. dots: each operand is read along its rows."""
    found = slowness(dtype)
    if found < SLOWER:
        return NEVER
    if found < MUCH_SLOWER:
        return FEW_ROWS
    return DOT_ROWS if dots else 0
