"""The node that reads the numbers of a numpy array of integers."""

from __future__ import annotations

import torch
from torch import fx

MOST = 1 << 53  # sums of a thousand such numbers are what numpy's 64 bits give


class LargeNumberError(OverflowError):
    """No error of the user's: a captured step goes on as plain Python from here."""


def array_numbers(tensor: torch.Tensor) -> list[int]:
    """The numbers of ``tensor.numpy()``, a vector of int64, as Python ints.

    Raises LargeNumberError for one beyond 2**53: the graph adds them as Python does, which does not wrap around.
    """
    numbers = tensor.tolist()
    if any(not -MOST < number < MOST for number in numbers):
        raise LargeNumberError("moebius follows numpy's integers up to 2**53; compute with larger ones elsewhere")
    return numbers


fx.wrap("array_numbers")
