"""Whether what forward has multiplied is still there in backward, where autograd's versions do not tell:
``p.data.mul_(...)`` counts for nothing.

Autograd's loop over experts has kept each expert's tokens and routing weights, which it has picked out, and its
result, of which a routing weight's gradient is made. The operator keeps the tokens as they came and computes the rest
anew: from other numbers it would be another gradient.
"""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLE = 1 << 14  # numbers that are looked at, in all


class Sample(NamedTuple):
    """Numbers of a tensor, and the memory that they were read from. (A hook on saved tensors gives back another.)"""

    storage: weakref.ref[torch.UntypedStorage]
    numbers: bytes

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in that memory, which may be gone, and its address another tensor's."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() == tensor.untyped_storage().data_ptr()


def sampled(tensors: Iterable[Tensor | None]) -> list[Sample]:
    """Numbers at evenly spaced places of each tensor, all of them where they are few. Nothing of tensors that are not
    on a CPU, where to look would be to wait, and of those that are traced."""
    real = looked_at(tensors)
    return [Sample(weakref.ref(t.untyped_storage()), picked(t, SAMPLE // len(real))) for t in real]


def looked_at(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None and type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"]


def picked(tensor: Tensor, most: int) -> bytes:
    """About ``most`` of its numbers: the same ones whatever its strides."""
    there, step = tensor.detach(), -(-tensor.numel() // max(most, 1)) | 1  # odd: not the same column of every row
    if there.is_contiguous():
        found = there.view(-1)[::step].contiguous()
    else:
        found = there.take(torch.arange(0, there.numel(), step, dtype=torch.int64, device=there.device))
    return ctypes.string_at(found.data_ptr(), found.numel() * found.element_size())


def refuse_changed(tensors: Sequence[Tensor | None], before: Sequence[Sample]) -> None:
    """RuntimeError where the numbers in a tensor's memory are others than when they were sampled."""
    real = looked_at(tensors)
    for tensor, sample in zip(real, before, strict=False):
        if sample.is_of(tensor) and picked(tensor, SAMPLE // len(real)) != sample.numbers:
            raise RuntimeError(
                "weights, tokens or routing weights of experts were changed between forward and backward in a way that "
                "autograd does not see (weight.data.mul_(…) or the like): change them after backward"
            )
