"""Rows of several tensors as rows of one buffer, so that they travel in one collective; each dtype kept to the bit.

It is filled and read in integers of the smallest element among the tensors: no byte is added, nothing is converted.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def pack(tensors: Sequence[Tensor], rows_S: Tensor | None = None) -> Tensor:
    """Rows of tensors [T, ...], side by side: [S, bytes], or of one tensor [S, ...]. rows_S: which, and in which order;
    all of them without."""
    held = [tensor if rows_S is None else tensor.index_select(0, rows_S) for tensor in tensors]
    if len(held) == 1:
        return held[0].contiguous()
    word = _word(held)
    flat = [tensor.contiguous().view(tensor.shape[0], _numbers(tensor)).view(word) for tensor in held]
    return torch.cat(flat, 1).view(torch.uint8)  # gloo sends no int16


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a buffer that :func:`pack` made of tensors like these: [S, ...] each, of their dtypes."""
    if len(tensors) == 1:
        return [packed]
    word = _word(tensors)
    widths = [_numbers(tensor) * tensor.element_size() // word.itemsize for tensor in tensors]
    parts = packed.view(word).split(widths, 1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(tensor.dtype).view(packed.shape[0], *tensor.shape[1:])
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _word(tensors: Sequence[Tensor]) -> torch.dtype:
    return WORDS[min(8, *(tensor.element_size() for tensor in tensors))]


def _numbers(tensor: Tensor) -> int:
    return prod(tensor.shape[1:])
