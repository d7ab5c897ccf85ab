"""What torch's optimizers ask of each tensor in their lists, asked of all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_facts import torch_lists
from ..values.values import TensorProxy
from .parts import Parts
from .substitutes import shared_group


class TensorLists:
    """call: calls a function as the step would."""

    def __init__(self, domain: Parts, call: Callable[..., Any]):
        self.domain, self.objects, self.call = domain, domain.objects, call
        self.functions: dict[Any, Callable[..., Any]] = {
            shared_group: self.shared_group,
            torch_lists.has_foreach_support: self.has_foreach_support,
        }

    def shared_group(self, lists: list[list[Any]]) -> Any:
        first = lists[0]
        plain = all(map(self.is_made_here, lists)) and all(type(each) is TensorProxy for each in first)
        if not plain or any(len(values) not in (0, len(first)) for values in lists):
            return None
        keys = {(each.fake.device, each.fake.dtype) for each in first}
        return self.objects.made(keys.pop()) if len(keys) == 1 else None

    def has_foreach_support(self, tensors: Any, device: Any) -> Any:
        if self.is_made_here(tensors) and all(type(t) is TensorProxy and t.cls is torch.Tensor for t in tensors):
            return self.call(torch_lists.device_has_foreach_support, [device], {})
        function: Any = torch_lists.has_foreach_support
        return self.domain.call_function(function, [tensors, device], {})

    def is_made_here(self, values: Any) -> bool:
        return type(values) is list and self.objects.is_new(values)
