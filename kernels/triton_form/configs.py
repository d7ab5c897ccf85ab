"""The default tile shapes, each compiled ahead of time for sm_90 in the tests: no spills, wgmma in the machine code."""
from __future__ import annotations

import torch

from moebius.kernels.triton_form.launch import Config

SPLIT_FROM = 32  # columns from which an epilogue works in halves
GROUP = 8  # tiles walked down before the next column

# (kernel, 16-bit?) -> (for many rows an expert, for few)
DEFAULTS: dict[tuple[str, bool], tuple[Config, Config]] = {
    ("up", True): (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    ("up_ungated", True): (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    ("down", True): (Config(128, 256, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    ("grad_x", True): (Config(128, 256, 64, 8, 3), Config(64, 128, 64, 4, 3)),
    ("grad_act", True): (Config(128, 128, 64, 8, 3), Config(64, 128, 64, 8, 3)),
    ("weight_grad", True): (Config(128, 128, 64, 8, 3), Config(128, 128, 32, 8, 3)),
    ("up", False): (Config(64, 64, 32, 8, 2), Config(32, 64, 32, 4, 2)),
    ("up_ungated", False): (Config(64, 64, 32, 8, 2), Config(32, 64, 32, 4, 2)),
    ("down", False): (Config(64, 128, 32, 8, 2), Config(32, 64, 32, 4, 2)),
    ("grad_x", False): (Config(64, 128, 32, 8, 2), Config(32, 64, 32, 4, 2)),
    ("grad_act", False): (Config(64, 64, 32, 8, 2), Config(32, 64, 32, 4, 2)),
    ("weight_grad", False): (Config(64, 128, 32, 8, 2), Config(64, 64, 32, 4, 2)),
}
MANY_ROWS = 96  # mean rows an expert from which the larger tiles are taken


def choose(kernel: str, dtype: torch.dtype, slots: int, num_experts: int) -> Config:
    """The default for a kernel, by element size and mean rows an expert (known on the host; the counts are not)."""
    many, few = DEFAULTS[kernel, dtype.itemsize == 2]
    return many if slots >= MANY_ROWS * num_experts else few
