"""``token.tolist()`` that is there to index with, ``x[None, token_list]``, as some libraries write it, or to make a
tensor of: ``pack_padded_sequence(x, lengths.tolist())``.

An ``IndexList`` stands for the list. torch takes a list of ints for the tensor of these, so as an index it is the
tensor, a copy from where ``tolist()`` was called. What else a program does with it is a graph break.
"""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.numbers import is_open, number_kind
from ..values.residual_program import Expression, Residual, method
from ..values.values import Operations, SymbolicObject, TensorProxy, decided_by_data


class IndexList(SymbolicObject):
    """A list of ints while tracing, of a vector whose length only the running step knows."""

    __slots__ = ("__weakref__", "proxy")
    kind = list

    def __init__(self, proxy: TensorProxy):
        self.proxy = proxy

    def length(self) -> Any:
        return self.proxy.fake.shape[0]

    def place(self, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> tuple[Any, torch.dtype]:
        """Where ``torch.tensor`` and ``torch.as_tensor`` put what they make of the list, and its dtype."""
        if requires_grad:
            self.refuse("a tensor with a gradient")
        return torch.get_default_device() if device is None else device, dtype or torch.int64

    def expression(self, emitter: Residual) -> Expression:
        return method(emitter.value(self.proxy), "tolist")


def index_list(proxy: TensorProxy) -> IndexList | None:
    """What stands for ``proxy.tolist()``, None where it is not such a vector."""
    if proxy.fake.dim() != 1 or proxy.fake.dtype is not torch.int64 or is_kind(proxy.fake.shape[0], int):
        return None
    return IndexList(proxy.operations.method(proxy, "clone", (), {}))


class IndexRange(SymbolicObject):
    """``range(size)`` of a size that only the running step knows, as detectors write it: ``t[range(n), labels]``. As an
    index it is the tensor of its numbers; whoever goes through it needs the size."""

    __slots__ = ("__weakref__", "size", "tensors")
    kind = range

    def __init__(self, tensors: Operations, size: torch.SymInt):
        self.tensors, self.size = tensors, size

    @property
    def proxy(self) -> TensorProxy:
        found: TensorProxy = self.tensors.function(torch.arange, (self.size,), {"device": "cpu"})
        return found

    def length(self) -> Any:
        return self.size

    def iterate(self) -> Any:
        raise decided_by_data()

    def expression(self, emitter: Residual) -> Expression:
        return emitter.call(range, self.size)


def index_range(tensors: Operations, args: list) -> IndexRange | None:
    """What stands for ``range(*args)``; None where it is Python's own."""
    size = args[0] if len(args) == 1 else None
    if type(size) is not torch.SymInt or not torch_private.depends_on_values(size):
        return None
    return IndexRange(tensors, size) if torch_private.is_certain(size >= 0) else None


def as_indices(key: Any) -> Any:
    """The key of a tensor's item with tensors in the place of such lists."""
    if type(key) in (IndexList, IndexRange):
        return key.proxy
    return tuple(map(as_indices, key)) if type(key) is tuple else key


def is_varying_list(key: Any) -> bool:
    """Whether a part of an index is a list of ints with one that only the running step knows."""
    return type(key) is list and is_open(key) and all(number_kind(item) in (int, torch.SymInt) for item in key)
