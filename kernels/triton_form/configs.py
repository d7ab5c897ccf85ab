"""The default tile shapes, each compiled ahead of time for sm_90 in the tests: no spills, wgmma in the machine code."""
from __future__ import annotations

import torch
import triton

from moebius.kernels.triton_form.launch import Config, Problem, dot_precision
from moebius.kernels.triton_form.tuning import configured, problem

GROUP = 8  # tiles walked down before the next column
MANY_ROWS = 96  # mean rows an expert from which the larger tiles are taken

# Where the epilogue packs H (packing.py), a tile of 128 rows waits for each wgmma on Triton 3.6, and spills on 3.9.
PACKS_SMALL = triton.__version__.startswith(("3.6.", "3.9."))

# Kernel -> (for many rows an expert, for few), by how the operands are multiplied.
HALF: dict[str, tuple[Config, Config]] = {  # bfloat16, float16
    "up": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    "up_ungated": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "up_packed": (Config(64 if PACKS_SMALL else 128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    "up_ungated_packed": (Config(64 if PACKS_SMALL else 128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "down": (Config(128, 256, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "grad_x": (Config(128, 256, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    "grad_act": (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    "weight_grad": (Config(128, 128, 64, 8, 3), Config(128, 128, 32, 8, 3)),
}
TF32: dict[str, tuple[Config, Config]] = {
    name: (Config(128, 128, 32, 8, 3), Config(64, 128, 32, 8, 3)) for name in ("up", "up_ungated", "down", "grad_x")
} | {
    "grad_act": (Config(128, 64, 32, 8, 3), Config(64, 128, 32, 8, 3)),
    "weight_grad": (Config(128, 128, 32, 8, 3), Config(128, 128, 32, 8, 3)),
}
EXACT: dict[str, tuple[Config, Config]] = {  # float32 without TF32: no tensor cores
    name: (Config(64, 64, 16, 8, 2), Config(32, 64, 16, 4, 2)) for name in ("up", "up_ungated", "down", "grad_x")
} | {
    "down": (Config(64, 64, 16, 4, 2), Config(32, 64, 16, 4, 2)),  # with 8 warps 8 bytes spill on Triton 3.6 and 3.9
    "grad_act": (Config(32, 64, 16, 4, 2), Config(32, 64, 16, 4, 2)),
    "weight_grad": (Config(64, 128, 32, 8, 2), Config(64, 64, 32, 4, 2)),
}


# 8-bit operands: a block of the format is a tile of the contraction, or a part of it.
FORMATS: dict[str, dict[str, tuple[Config, Config]]] = {
    "fp8": {name: (Config(64, 128, 64, 8, 3), Config(64, 128, 64, 8, 3))
            for name in ("up_ungated", "down", "grad_x", "grad_act")} | {
        "up": (Config(64, 128, 64, 8, 2), Config(64, 128, 64, 8, 2))},  # with 3 stages 8 bytes spill on Triton 3.6
    "fp8_block": {name: (Config(64, 128, 128, 8, 2), Config(64, 128, 128, 8, 2))
                  for name in ("up_ungated", "down", "grad_x", "grad_act")} | {
        "up": (Config(64, 128, 128, 8, 3), Config(64, 128, 128, 8, 3)),  # with 2 stages 8 bytes spill on sm_90
        "weight_grad": (Config(64, 64, 128, 8, 2), Config(64, 64, 128, 8, 2))},  # 128 wide 72 spill on Triton 3.6
    "mxfp8": {name: (Config(64, 128, 64, 8, 3), Config(64, 128, 64, 8, 3))
              for name in ("up", "up_ungated", "down", "grad_x", "grad_act", "weight_grad")},
}


def choose(kernel: str, dtype: torch.dtype, slots: int, num_experts: int, inner: int, outer: int, name: str | None,
           device: torch.device) -> tuple[Config, Problem]:
    """What was measured for a kernel at these sizes (tuning.py), else the default.

    inner: of the contraction, outer: columns of the result. name: of the format. The default goes by dtype, format and
    mean rows an expert (known on the host; the counts are not). A kernel "…_packed" that a table does not have is as
    the one that does not pack.
    """
    if name is not None:
        table = FORMATS[name]
    else:
        table = HALF if dtype.itemsize == 2 else TF32 if dot_precision(dtype) == "tf32" else EXACT
    many, few = table[kernel] if kernel in table else table[kernel.removesuffix("_packed")]
    default = many if slots >= MANY_ROWS * num_experts else few
    each = problem(kernel, dtype, name, slots, num_experts, inner, outer)
    return configured(each, default, device), each


def epilogue_parts(block_n: int) -> int:
    """In how many pieces an epilogue works at most: each at least 16 columns and at most 32 (64 spill on sm_90)."""
    return 4 if block_n >= 128 else 2 if block_n >= 32 else 1
