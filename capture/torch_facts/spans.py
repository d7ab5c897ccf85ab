"""Where tensors lie in memory, and which of them overlap."""

from __future__ import annotations

from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_memory(tensor: Any) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.device.type != "meta"


def reach(tensor: torch.Tensor) -> int:
    """How many bytes from its first element to behind its last one."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize if tensor.numel() else 0


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its elements lie, (0, 0) where it has none."""
    address = tensor.data_ptr() if tensor.numel() else 0
    return (address, address + reach(tensor)) if address else (0, 0)


def firsts_of(spans: list[tuple[int, int]]) -> list[int]:
    """For each span the first of those that it overlaps with, directly or by others; its own place where there are
    none."""
    groups, end = list[list[int]](), 0
    for begin, until, place in sorted((*one, place) for place, one in enumerate(spans)):
        if begin >= end:
            groups.append([])
        groups[-1].append(place)
        end = max(end, until)
    first_of = {place: first for group in groups for first in (min(group),) for place in group}
    return [first_of[place] for place in range(len(spans))]
