"""Whether weights that shall be equal on ranks are: a sample of them after each backward, another one each time.

The sample's bits go into the header that ends a backward anyway. Where they differ the ranks compare the numbers
themselves: rounding (other kernels on one rank) may drift apart, a weight that was written on one rank alone may not.
"""
from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moebius.lowering.distribution.agree import all_reduce
from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.sharded import Sharded
from moebius.lowering.distribution.torch_private import for_each_rank

WEIGHTS = 32  # that are looked at after one backward
NUMBERS = 128  # of each of those
APART = 1e-3  # what rounding may add up to, of the sample's largest number; of coarse types 16 steps


def window(places: list[int], iteration: int) -> list[int]:
    """Those of these places that this iteration looks at."""
    return [places[(iteration * WEIGHTS + number) % len(places)] for number in range(min(len(places), WEIGHTS))]


class Weights:
    """A sample of weights that are equal on the ranks of these axes of a mesh. tensors: None for what is not there."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], iteration: int, axes: Sequence[int]):
        self.tensors, self.axes = tensors, axes
        self.numbers = [None if tensor is None else some(tensor, iteration) for tensor in tensors]

    def compare(self, mesh: Any) -> None:
        """Raise DistributionError, on all ranks of the mesh, where the numbers are apart. Collective."""
        nothing = -torch.finfo(torch.float64).max
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        bounds = torch.full((2, len(self.numbers), NUMBERS), nothing, **exact)  # of numbers, of negatives
        for row, numbers in enumerate(self.numbers):
            if numbers is not None:
                there = numbers.double().cpu().nan_to_num(posinf=1e300, neginf=-1e300)
                bounds[0, row, : len(there)], bounds[1, row, : len(there)] = there, -there
        bounds = bounds.to(mesh.device_type)
        all_reduce(bounds, mesh, self.axes, "header", dist.ReduceOp.MAX)
        signs = torch.tensor([1, -1], **exact).to(bounds)[:, None, None]
        high, low = torch.where(bounds == nothing, 0.0, bounds) * signs
        apart = (high - low).amax(-1)
        coarse = [APART if t is None else max(APART, 16 * torch.finfo(t.dtype).eps) for t in self.tensors]
        apart[apart <= torch.maximum(high.abs(), low.abs()).amax(-1) * torch.tensor(coarse, **exact).to(apart)] = 0
        all_reduce(apart, mesh, range(mesh.ndim), "header", dist.ReduceOp.MAX)
        found = [(t, float(by)) for t, by in zip(self.tensors, apart.cpu(), strict=True) if by]
        if found:
            shape = next((f" of shape {tuple(tensor.shape)}" for tensor, _ in found if tensor is not None), "")
            raise DistributionError(
                f"a parameter{shape} has other values on another rank, up to {found[0][1]:.3g} apart: it was written "
                f"on one rank alone, or the ranks took other steps; do the same on all ranks"
            )


def digest(weights: Sequence[Weights], axis: int, value: int) -> int:
    """Of ``value`` and of all samples that are equal along an axis of the mesh."""
    return digest_of_bits([numbers for held in weights if axis in held.axes for numbers in held.numbers], value)


@for_each_rank
def digest_of_bits(samples: list[torch.Tensor | None], value: int) -> int:
    """A number that differs where the numbers' bits do."""
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for numbers in samples:
        if numbers is not None and numbers.numel():
            alike.setdefault(numbers.dtype, []).append(numbers)
    bits = 0
    for held in alike.values():  # (one copy to the CPU for each)
        bits = zlib.crc32(torch.cat(held).view(torch.uint8).cpu().numpy().tobytes(), bits)
    return value ^ bits


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: of one that is split, its part, in the same memory. Reads no history."""
    return tensor.local if isinstance(tensor, Sharded) else tensor.to_local() if isinstance(tensor, DTensor) else tensor


def some(tensor: torch.Tensor, iteration: int) -> torch.Tensor:
    """Up to NUMBERS numbers that lie together, of this rank's rows; the next ones in the next iteration."""
    return some_of(here(tensor).detach(), iteration)


@for_each_rank
def some_of(tensor: torch.Tensor, iteration: int) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    while tensor.dim() > 1 and tensor.numel() > NUMBERS and not tensor.is_contiguous():
        iteration, row = divmod(iteration, tensor.shape[0])
        tensor = tensor.select(0, row)
    flat = tensor.reshape(-1)
    start = iteration % -(-flat.numel() // NUMBERS) * NUMBERS if flat.numel() else 0
    return flat[start : start + NUMBERS]
