"""What a call allocates, by watching every operation: the largest tensor, and the peak of what is alive at once."""
from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """largest: elements of the largest storage made inside; peak: elements of all of them alive at one time; made:
    (dtype, shape) of every tensor with a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.known: set[int] = set()
        self.made: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def add(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in given:
            return
        self.made.append((tensor.dtype, tuple(tensor.shape)))
        size = storage.nbytes() // max(tensor.itemsize, 1)
        self.known.add(key)
        self.largest, self.alive = max(self.largest, size), self.alive + size
        self.peak = max(self.peak, self.alive)

        def free() -> None:
            self.known.discard(key)
            self.alive -= size

        weakref.finalize(storage, free)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {a.untyped_storage()._cdata for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
        result = func(*args, **kwargs)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor):
                self.add(made, given)
        return result
