"""Nodes that hold the data to what capture took of sizes: two that only the running step knows are equal."""

from __future__ import annotations

import torch
from torch import fx

from moebius.lowering.step.in_python import InPythonError


class UnequalSizesError(InPythonError):
    """Two sizes differ that the graph takes to be equal. place: of the instruction that met them."""

    def __init__(self, one: int, other: int, place: str):
        super().__init__(
            f"an operator at {place} meets the sizes {one} and {other}, and the step was captured with equal ones: "
            "run it as captured by moebius, which goes on from there as Python"
        )
        self.one, self.other, self.place = one, other, place


def require_equal(one: int, other: int, place: str, *live: torch.Tensor) -> None:
    """What comes after in the graph holds where these are equal. Raises UnequalSizesError, which capture answers.

    live: what Python then goes on with, and is kept until here for that.
    """
    if one != other:
        raise UnequalSizesError(one, other, place)


def rows_between(size: int, start: int | None, end: int | None, step: int) -> int:
    """How many rows ``x[start:end:step]`` has of ``size``."""
    return len(range(size)[start:end:step])


fx.wrap("require_equal")
fx.wrap("rows_between")
