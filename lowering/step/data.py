"""The node that gives a tensor other data in the middle of a graph."""

from __future__ import annotations

import torch
from torch import fx


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, in its place among the graph's nodes: from then on the two share storage."""
    tensor.data = data


set_data.writes = (0,)  # type: ignore[attr-defined]  # the argument that is another one from then on (aliasing.py asks)
fx.wrap("set_data")
