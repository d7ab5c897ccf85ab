"""What stands, while tracing, for the rows of a tensor that a loop goes over."""

from __future__ import annotations

from typing import Any

from .values import Break, TensorProxy


class TensorRows:
    """The iterator over the rows of a tensor whose length is not known while tracing.

    numbers: it stands for ``tensor.tolist()`` instead, at once iterated over: rows are Python ints. of_array: they are
    numpy's, of ``tensor.numpy()``. site: the instruction that asked for it, where the length is a size of the step's.
    """

    def __init__(self, proxy: TensorProxy, numbers: bool = False, of_array: bool = False, site: Any = None):
        self.proxy, self.numbers, self.of_array, self.site = proxy, numbers, of_array, site
        self.finished = self.begun = False

    def begin(self) -> TensorRows:
        """``iter(self)``. A list may be iterated over again, which this cannot."""
        if self.begun and self.numbers:
            raise Break("tensor read as a number", "tolist() of a tensor of unknown length", "iterate over the tensor")
        self.begun = True
        return self
