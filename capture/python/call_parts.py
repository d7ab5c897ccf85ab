"""What the families of calls lean on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..values.values import SYMBOLIC, LoopLeftover, StandIn, TensorMethod, TensorProxy

if TYPE_CHECKING:
    from ..heap.heap import Heap
    from ..heap.objects import Objects
    from ..tensors.tensors import TensorOperations
    from .attributes import Attributes
    from .domain import TrackingDomain


class CallParts:
    """Base of the families; ``calls.Calls`` puts them together and dispatches."""

    domain: TrackingDomain
    attributes: Attributes
    heap: Heap
    objects: Objects
    tensors: TensorOperations
    # what other families define
    init_container: Callable[..., None]
    sort: Callable[..., list]
    allocate: Callable[..., Any]
    construct: Callable[..., Any]
    is_instance: Callable[..., bool]
    native: Callable[[Any, list, dict[str, Any]], Any]
    object_init: Callable[..., None]
    operands: Callable[[list, dict[str, Any]], tuple[list, dict[str, Any]]]

    def call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """Call anything callable in the trace."""
        raise NotImplementedError

    def known(self, value: Any) -> bool:
        """Whether the object existed before the call."""
        return id(value) in self.objects.records

    def drain(self, value: Any) -> list:
        """All items of an iterable."""
        raise NotImplementedError

    def fast(self, value: Any) -> list:
        """What C code reads a sequence or an iterable as."""
        raise NotImplementedError

    def listed(self, value: Any) -> list:
        """`list(value)`."""
        raise NotImplementedError

    def mapping_or_items(self, value: Any, base: type) -> Any:
        """The argument of ``update``/``extend``: a native mapping or iterator."""
        raise NotImplementedError

    def kind_of(self, value: Any) -> type:
        """``type(value)``."""
        raise NotImplementedError

    def shallow(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A builtin that treats items as opaque."""
        raise NotImplementedError

    def callback(self, function: Any) -> Callable[..., Any]:
        """A native callable that runs ``function`` in the trace."""
        raise NotImplementedError


def holds_proxy(value: Any) -> bool:
    """Whether a tuple, list or dict argument holds tensors."""
    if isinstance(value, tuple | list):
        return any(isinstance(v, TensorProxy) or holds_proxy(v) for v in value)
    return isinstance(value, dict) and any(isinstance(v, TensorProxy) for v in value.values())


def is_alien(value: Any) -> bool:
    """Values that exist in the trace only, other than tensors."""
    return issubclass(type(value), (*SYMBOLIC, TensorMethod, LoopLeftover, StandIn))
