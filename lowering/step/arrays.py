"""The node that reads the numbers of a numpy array of integers."""

from __future__ import annotations

import torch
from torch import fx

MOST = 1 << 53  # sums of a thousand such numbers are what numpy's 64 bits give


def array_numbers(tensor: torch.Tensor) -> list[int]:
    """The numbers of ``tensor.numpy()``, a vector of int64, as Python ints.

    Raises OverflowError for one beyond 2**53: the step adds them as Python does, which does not wrap around.
    """
    numbers = tensor.tolist()
    if any(not -MOST < number < MOST for number in numbers):
        raise OverflowError("moebius follows numpy's integers up to 2**53; compute with larger ones elsewhere")
    return numbers


fx.wrap("array_numbers")
