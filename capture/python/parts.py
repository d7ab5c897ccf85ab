"""What the parts of the tracking domain, and the families of calls, lean on."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from moebius.interpreter import Domain, Frame, is_kind

from ..bytecode.counting import Counter
from ..guards.recorder import GuardRecorder
from ..heap.heap import Heap
from ..heap.objects import Objects
from ..heap.records import Record
from ..heap.walks import Walks
from ..options import Options
from ..regions.loop_regions import LoopRegion
from ..tensors.array_calls import ArrayCalls
from ..tensors.array_inputs import ArrayInputs
from ..tensors.arrays import Arrays
from ..tensors.bounds import Bounds
from ..tensors.gradients import Gradients
from ..tensors.numbers import Numbers
from ..tensors.tensors import TensorOperations
from ..values.values import SYMBOLIC, SymbolicObject, TensorMethod, TensorProxy, UndefinedAfterLoop
from .attributes import Attributes
from .loop_iterators import LoopIterators
from .texts import Texts


class RowLoops(Protocol):
    """``regions.loops.Loops``."""

    open: list[LoopRegion]
    sized: Any  # ``regions.sized_rows.SizedRows``

    def rows(self, proxy: Any) -> Any: ...

    def numbers(self, proxy: TensorProxy) -> Any: ...

    def pairs(self, maker: Any, values: list, kwargs: dict[str, Any]) -> Any: ...

    def next_row(self, rows: Any) -> Any: ...



class GatheredLists(Protocol):
    """``regions.conditional_lists.Lists``."""

    def make(self, items: list) -> Any: ...

    def appends(self, owner: Any) -> None: ...


class ListEnds(Protocol):
    """``tails.Tails``."""

    def length_of(self, record: Any, most: int) -> Any: ...

    def at(self, values: Any, key: slice) -> Any: ...

    def call(self, function: Any, values: Any) -> Any: ...


class ModuleCalls(Protocol):
    """``regions.module_reuse.ModuleReuse``."""

    def call(self, module: Any, args: list, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any: ...


class Parts(Domain):
    """Base of the tracking domain's parts; ``domain.TrackingDomain`` puts them together."""

    row_types: tuple[type, ...]
    objects: Objects
    tensors: TensorOperations
    numbers: Numbers
    texts: Texts
    array_calls: ArrayCalls
    array_inputs: ArrayInputs
    arrays: Arrays
    bounds: Bounds
    tails: ListEnds
    attributes: Attributes
    walks: Walks
    options: Options | None
    instructions: int
    counter: Counter
    root_steps: int
    handles_errors: Callable[[], bool]
    asked_compiling: set[tuple[str, str]]
    compiling_for: frozenset[tuple[str, str]]
    making: dict[Frame | None, Any]
    calls: CallParts
    lists: GatheredLists
    loops: RowLoops
    iterators: LoopIterators
    sizes: Any  # ``few_sizes.FewSizes``
    blocks: ModuleCalls | None
    # what other parts define
    # an iterator over `value` that C code may be given. in_loop: which makes another of it, as enumerate does
    native_iter: Callable[..., Any]
    pairs: Callable[..., Any]  # ``loops.pairs``
    has_items: Callable[[Any], bool]  # whether it is an array of numpy's that is iterated over here
    by_own_method: Callable[..., Any]  # what a special method of the user's gives, ABSENT where there is none
    # a graph break for values that have no meaning outside of the trace's own machinery
    refuse_alien: Callable[[Any], None]
    # what the type says of its operators; a graph break where they read, in C, what no guard sees of the value
    guard_operators: Callable[[Any, Any], None]
    # a function that existed before: its code and defaults are facts, and the defaults become known objects
    guard_function: Callable[[types.FunctionType], None]
    count: Callable[[Frame], None]  # the frame's instruction runs, for the report
    globals_record: Callable[..., Record]  # what is known of a module's globals
    # known containers in an argument replaced by what stands for them, so that C code may read them
    plain_contents: Callable[[Any], Any]
    kept_in_an_exception: Callable[[Any], Any]
    as_count: Callable[[Any], Any]  # what C code takes for an index or a count
    as_index: Callable[[Any], Any]  # what a sequence is indexed with
    sequence_item: Callable[[Any, Any], Any]  # what a sequence has at an index, whatever methods its class has
    dict_item: Callable[[Any, type, Any], Any]  # the same of a dict, or what its ``__missing__`` gives
    operand: Callable[[Any], Any]  # what stands for a value in an operator of C's
    is_or_equals: Callable[[Any, Any], bool]
    text_of: Callable[..., Any]  # ``str(value)``
    repr_of: Callable[[Any], Any]  # ``repr(value)``
    has_plain_text: Callable[[Any], bool]  # whether C code may write a value down
    percent: Callable[[str, Any], Any]  # ``text % values``

    @property
    def frame(self) -> Frame | None:
        """The one that runs."""
        return self.machine.frame

    @property
    def open_loops(self) -> list[LoopRegion]:
        """The loops and branches that the running code is in and that are written down as one node."""
        return self.loops.open


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
    streams: Any  # ``streams.Streams``
    sizes: Any  # ``few_sizes.FewSizes``
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
    call: Callable[[Any, list, dict[str, Any]], Any]  # call anything callable in the trace
    drain: Callable[[Any], list]  # all items of an iterable
    by_keys: Callable[[Any, Any], dict[Any, Any]]  # a dict of what a mapping has
    overridden: Callable[..., Any]  # what a class of the user's answers in an operator's place, ABSENT if none does
    fast: Callable[..., list]  # what C code reads a sequence or an iterable as
    listed: Callable[..., list]  # `list(value)`, or what another type takes of it
    refuse_own_methods: Callable[[type, str], None]  # where C code that copies a container calls the user's
    members: Callable[[Any], Any]  # what C code adds to a set
    is_own: Callable[[type, str], bool]  # whether a class has a method in Python
    set_items: Callable[..., None]
    mapping_or_items: Callable[[Any, type], Any]  # the argument of ``update``/``extend``: a native mapping or iterator
    kind_of: Callable[[Any], type]  # ``type(value)``
    shallow: Callable[[Any, list, dict[str, Any]], Any]  # a builtin that treats items as opaque
    callback: Callable[[Any], Callable[..., Any]]  # a native callable that runs ``function`` in the trace
    container_method: Callable[[Any, type, str, list, dict[str, Any]], Any]  # a method of a builtin container's
    plain_items: Callable[[Any], Any]  # a container's items, for C code
    substitute: Callable[[Any], Any]  # a function of ours, as one that the trace calls

    @property
    def array_inputs(self) -> ArrayInputs:
        return self.domain.array_inputs

    @property
    def array_calls(self) -> ArrayCalls:
        return self.domain.array_calls

    def known(self, value: Any) -> bool:
        """Whether the object existed before the call."""
        return id(value) in self.objects.records


def holds_proxy(value: Any) -> bool:
    """Whether a tuple, list or dict argument holds tensors, in one that the step was given as they are themselves."""
    if is_kind(value, tuple | list):
        return any(is_kind(v, TensorProxy | torch.Tensor) or holds_proxy(v) for v in value)
    return is_kind(value, dict) and any(is_kind(v, TensorProxy | torch.Tensor) for v in value.values())


def tensors_in(args: Iterable[Any]) -> str:
    """What a report says of a call's tensors: their device, where it is not the CPU."""
    flat = [value for given in args for value in (given if is_kind(given, tuple | list) else (given,))]
    devices = {str(value.fake.device) for value in flat if is_kind(value, TensorProxy)} - {"cpu"}
    return " on ".join(["tensors", *sorted(devices)[:1]])


def is_alien(value: Any) -> bool:
    """Values that exist in the trace only, other than tensors."""
    return issubclass(type(value), (*SYMBOLIC, TensorMethod, UndefinedAfterLoop, SymbolicObject))
