"""What effects ask of what stands above them: of the residual code that replays them, of look-ups on classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..values.values import TensorProxy
from .heap import Heap
from .objects import Objects


class TensorAttributes(Protocol):
    """torch's own attributes of tensors."""

    def attribute(self, proxy: TensorProxy, name: str, enter: Callable[..., Any]) -> Any: ...


class ClassLookups(Protocol):
    """Attributes that are looked up on classes."""

    heap: Heap
    objects: Objects

    @property
    def tensors(self) -> TensorAttributes: ...

    def on_type(self, cls: type, name: str) -> Any: ...

    def bind(self, raw: Any, owner: Any, cls: type) -> Any: ...
