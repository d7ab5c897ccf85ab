"""What torch's optimizers ask of each tensor in their lists, asked of all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..torch_facts import torch_private
from ..values.values import TensorProxy
from .parts import Parts
from .substitutes import shared_group


class TensorLists:
    def __init__(self, domain: Parts):
        self.domain, self.objects = domain, domain.objects
        self.functions: dict[Any, Callable[..., Any]] = {
            shared_group: self.shared_group,
            torch_private.has_foreach_support: self.has_foreach_support,
        }

    def shared_group(self, lists: list[list[Any]]) -> Any:
        first = lists[0]
        plain = all(map(self.is_made_here, lists)) and all(type(each) is TensorProxy for each in first)
        if not plain or any(len(values) not in (0, len(first)) for values in lists):
            return None
        keys = {(each.fake.device, each.fake.dtype) for each in first}
        return self.objects.made(keys.pop()) if len(keys) == 1 else None

    def has_foreach_support(self, tensors: Any, device: Any) -> Any:
        function: Any = torch_private.has_foreach_support
        if self.is_made_here(tensors) and len(set(map(class_of, tensors))) == 1 and tensors[0] is not None:
            tensors = self.objects.made(tensors[:1])  # it asks for their types
        return self.domain.call_function(function, [tensors, device], {})

    def is_made_here(self, values: Any) -> bool:
        return type(values) is list and self.objects.is_new(values)


def class_of(value: Any) -> type:
    return value.cls if type(value) is TensorProxy else type(value)
