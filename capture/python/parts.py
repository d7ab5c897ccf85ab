"""What the parts of the tracking domain, and the families of calls, lean on."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from moebius.interpreter import Domain, Frame

from ..heap.objects import Objects
from ..heap.records import Record
from ..values.values import SYMBOLIC, LoopLeftover, StandIn, TensorMethod, TensorProxy

if TYPE_CHECKING:
    from ..bytecode.counting import Counter
    from ..guards.recorder import GuardRecorder
    from ..heap.heap import Heap
    from ..heap.walks import Walks
    from ..options import Options
    from ..regions.open_loops import OpenLoop
    from ..tensors.array_inputs import ArrayInputs
    from ..tensors.arrays import Arrays
    from ..tensors.gradients import Gradients
    from ..tensors.numbers import Numbers
    from ..tensors.tensors import TensorOperations
    from .attributes import Attributes
    from .texts import Texts


class RowLoops(Protocol):
    """``regions.loops.Loops``."""

    open: list[OpenLoop]

    def rows(self, proxy: TensorProxy) -> Any: ...

    def array_rows(self, proxy: TensorProxy) -> Any: ...

    def numbers(self, proxy: TensorProxy) -> Any: ...

    def next_row(self, rows: Any) -> Any: ...

    def note_range(self, iterator: Any) -> None: ...


class GatheredLists(Protocol):
    """``regions.gathered.Lists``."""

    def make(self, items: list) -> Any: ...

    def appends(self, owner: Any) -> None: ...


class ModuleCalls(Protocol):
    """``regions.blocks.Blocks``."""

    def call(self, module: Any, args: list, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any: ...


class Parts(Domain):
    """Base of the tracking domain's parts; ``domain.TrackingDomain`` puts them together."""

    objects: Objects
    tensors: TensorOperations
    numbers: Numbers
    texts: Texts
    array_inputs: ArrayInputs
    arrays: Arrays
    attributes: Attributes
    walks: Walks
    options: Options | None
    instructions: int
    counter: Counter
    root_steps: int
    asked_compiling: set[tuple[str, str]]
    told_compiling: frozenset[tuple[str, str]]
    making: dict[Frame | None, Any]
    calls: CallParts
    lists: GatheredLists
    loops: RowLoops
    blocks: ModuleCalls | None

    @property
    def frame(self) -> Frame | None:
        """The one that runs."""
        return self.machine.frame

    @property
    def open_loops(self) -> list[OpenLoop]:
        """The loops and branches that the running code is in and that are written down as one node."""
        return self.loops.open

    def native_iter(self, value: Any, in_loop: bool = False) -> Any:
        """An iterator over `value` that C code may be given. in_loop: which makes another of it, as enumerate does."""
        raise NotImplementedError

    def refuse_alien(self, value: Any) -> None:
        """A graph break for values that have no meaning outside of the trace's own machinery."""
        raise NotImplementedError

    def guard_operators(self, value: Any, names: Any) -> None:
        """What the type says of its operators; a graph break where they read, in C, what no guard sees of the value."""
        raise NotImplementedError

    def guard_function(self, function: types.FunctionType) -> None:
        """A function that existed before: its code and defaults are facts, and the defaults become known objects."""
        raise NotImplementedError

    def globals_record(self, namespace: Any, name: str = "") -> Record:
        """What is known of a module's globals."""
        raise NotImplementedError

    def plain_contents(self, value: Any) -> Any:
        """Known containers in an argument replaced by what stands for them, so that C code may read them."""
        raise NotImplementedError

    def operand(self, value: Any) -> Any:
        """What stands for a value in an operator of C's."""
        raise NotImplementedError

    def is_one(self, left: Any, right: Any) -> bool:
        """Whether two are one, or equal."""
        raise NotImplementedError

    def text_of(self, value: Any = "", *encoding: Any) -> Any:
        """``str(value)``."""
        raise NotImplementedError

    def repr_of(self, value: Any) -> Any:
        """``repr(value)``."""
        raise NotImplementedError


class CallParts:
    """Base of the families of calls; ``calls.Calls`` puts them together and dispatches."""

    domain: Parts
    attributes: Attributes
    heap: Heap
    objects: Objects
    tensors: TensorOperations
    numbers: Numbers
    texts: Texts
    gradients: Gradients
    guards: GuardRecorder
    functions: dict[Any, Callable[..., Any]]  # what answers for a function of Python's or torch's
    # what other families define
    init_container: Callable[..., None]
    sort: Callable[..., list]
    allocate: Callable[..., Any]
    construct: Callable[..., Any]
    is_instance: Callable[..., bool]
    length: Callable[[Any], Any]
    make_super: Callable[..., Any]
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

    def container_method(self, owner: Any, base: type, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of a builtin container's."""
        raise NotImplementedError

    def tensor_method(self, proxy: TensorProxy, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of a tensor's."""
        raise NotImplementedError

    def plain_items(self, container: Any) -> Any:
        """A container's items, for C code."""
        raise NotImplementedError

    def substitute(self, function: Any) -> Any:
        """A function of ours, as one that the trace calls."""
        raise NotImplementedError

    def variables(self, obj: Any) -> Any:
        """``vars(obj)``."""
        raise NotImplementedError


def holds_proxy(value: Any) -> bool:
    """Whether a tuple, list or dict argument holds tensors."""
    if isinstance(value, tuple | list):
        return any(isinstance(v, TensorProxy) or holds_proxy(v) for v in value)
    return isinstance(value, dict) and any(isinstance(v, TensorProxy) for v in value.values())


def is_alien(value: Any) -> bool:
    """Values that exist in the trace only, other than tensors."""
    return issubclass(type(value), (*SYMBOLIC, TensorMethod, LoopLeftover, StandIn))
