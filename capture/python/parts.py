"""What the parts of the tracking domain lean on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moebius.interpreter import Domain

if TYPE_CHECKING:
    from ..heap.objects import Objects
    from ..heap.walks import Walks
    from ..regions.gathered import Lists
    from ..regions.loops import Loops
    from ..tensors.array_inputs import ArrayInputs
    from ..tensors.tensors import TensorOperations
    from .attributes import Attributes
    from .calls import Calls


class Parts(Domain):
    """Base of the tracking domain's parts; ``domain.TrackingDomain`` puts them together."""

    objects: Objects
    tensors: TensorOperations
    array_inputs: ArrayInputs
    attributes: Attributes
    calls: Calls
    lists: Lists
    loops: Loops
    walks: Walks

    def native_iter(self, value: Any, in_loop: bool = False) -> Any:
        """An iterator over `value` that C code may be given. in_loop: which makes another of it, as enumerate does."""
        raise NotImplementedError

    def refuse_alien(self, value: Any) -> None:
        """A graph break for values that have no meaning outside of the trace's own machinery."""
        raise NotImplementedError

    def guard_operators(self, value: Any, names: Any) -> None:
        """What the type says of its operators; a graph break where they read, in C, what no guard sees of the value."""
        raise NotImplementedError
