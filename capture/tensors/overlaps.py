"""Which inputs of a graph have memory in common: a view that was made before the call, parameters cut of one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_facts.torch_private import storage_of


def overlapping(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """The places of those tensors that may have memory in common with another, each with a number of that memory."""
    spans: dict[int, list[tuple[Any, Any, int]]] = {}
    for place, tensor in enumerate(tensors):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
            begin = tensor.storage_offset() * tensor.itemsize
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            span = (begin, begin + (reach + 1) * tensor.itemsize, place)
            spans.setdefault(storage_of(tensor), []).append(span)
    found: dict[int, int] = {}
    for beside in spans.values():
        end, first = 0, -1
        for begin, until, place in sorted(beside):
            if begin < end:
                found[first] = found[place] = first
            else:
                first = place
            end = max(end, until)
    return found
