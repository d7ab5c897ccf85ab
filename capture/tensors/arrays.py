"""numpy arrays that are views of tensors: ``counts.cpu().numpy()``, and the numbers in them.

An ``Array`` stands for the array; what is read of it is read from the tensor, at that place in the program, so that
whatever was written into the tensor before is seen. One that is only kept or returned is made when the step has run.
An ``ArrayNumber`` stands for one of its numbers, a ``numpy.int64``: it slices tensors, is added and compared as numpy
does it. What else a program does with either is a graph break.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any, Protocol

import torch
from torch import fx

from moebius.interpreter import STOP, is_kind
from moebius.lowering.experts.routing import index_bounds
from moebius.lowering.operators import read_call
from moebius.lowering.step.arrays import MOST, array_item, array_numbers

from ..heap.objects import Objects
from ..hook import ABSENT
from ..python.number_sets import FEEDS
from ..regions.branches import BRANCHES
from ..torch_facts import torch_private
from ..values.numbers import OPERATIONS, PLAIN_NUMBERS, number_kind
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.opaque_tensor import OpaqueTensor
from ..values.residual_program import Call, Expression, Literal, Residual, Write, method
from ..values.values import BoundMethod, Break, CannotRebuild, SymbolicObject, TensorProxy, type_of
from .counts import FEW, unknown_number
from .interfaces import Domain

ITERATOR = type(iter(type("Sequence", (), {"__getitem__": None})()))  # what iter() of an array is
SUMS: dict[str, Callable[..., Any]] = {"+": operator.add, "-": operator.sub}
COPIES = frozenset({"copy", "flatten"})
NUMBERS = frozenset({"item", "tolist"})  # which are the tensor's own
METHODS = frozenset({"cumsum", "sum", "max", "min", "ravel"}) | NUMBERS | COPIES
OPERANDS = NUMPY_NUMBERS.union((*PLAIN_NUMBERS, torch.SymInt, torch.SymFloat))
KINDS = frozenset({  # what tensors and arrays both have
    torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.bool,
})  # fmt: skip


def numpy() -> Any:
    """The module, if the program has loaded it."""
    return sys.modules.get("numpy")


class ArrayNumber(SymbolicObject, named="int64"):
    """A ``numpy.int64`` while tracing. value: the int. certain: whether it is one, whichever way a branch went (else
    it may be a Python int of the same value). bounded: whether it is far from what 64 bits hold.
    """

    __slots__ = ("__weakref__", "arrays", "bounded", "certain", "domain", "value")

    def __init__(self, arrays: Arrays, value: int | torch.SymInt, certain: bool = True, bounded: bool = True):
        self.arrays, self.domain = arrays, arrays.domain
        self.value, self.certain, self.bounded = value, certain, bounded

    @property
    def kind(self) -> type:
        if not self.certain:
            raise Break("type of a number", "numpy's or Python's, as values decide", "convert it with int()")
        return numpy().int64

    def truth(self) -> bool:
        return self.domain.truth(self.value)

    def binary(self, op: str, left: Any, right: Any) -> Any:
        if is_kind(left, TensorProxy):
            return self.domain.binary(op, left, self.value)
        function = SUMS.get(op.removesuffix("="))
        if function is None or not all(map(is_small, (left, right))):
            self.refuse(f"{op} with a {type_of(right if left is self else left).__name__}")
        return self.arrays.number(function(*map(plain, (left, right))))

    def compare(self, op: str, left: Any, right: Any) -> Any:
        """Only where a branch looks at it: the answer is a ``numpy.bool``, as which nobody sees it then."""
        if is_kind(left, TensorProxy):
            return self.domain.compare(op, left, self.value)
        whole = all(type(value) in (ArrayNumber, int, torch.SymInt) for value in (left, right))
        if not whole or not self.arrays.decides_a_branch():
            self.refuse(f"{op} with a {type_of(right if left is self else left).__name__}")
        return OPERATIONS[op](*map(plain, (left, right)))

    def expression(self, emitter: Residual) -> Expression:
        if not self.certain:
            raise CannotRebuild("a number that is numpy's or Python's is alive across a graph break")
        return emitter.call(self.kind, self.value)


Origin = tuple[Any, list, dict[str, Any]]  # a function, and what it was given


class Calls(Protocol):
    """``array_calls.ArrayCalls``."""

    def call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any: ...

    def operator(self, op: str, *operands: Any) -> Any: ...

    def part(self, array: Any, key: Any) -> Array | None: ...

    def write(self, array: Any, values: Any) -> None: ...


def is_array_method(name: str) -> bool:
    """Whether it is a method of numpy's arrays, in C."""
    return type(getattr(numpy().ndarray, name, None)) is MethodDescriptorType and not name.startswith("__")


class Array(SymbolicObject, named="ndarray"):
    """A ``numpy.ndarray`` while tracing, which shares the memory of ``proxy``. Only of int64 its numbers are followed
    as numpy's; of all it has ``item()`` and the like, which give Python's. alone: whether no tensor of the program's
    lies in that memory, so that it can be an array's own. origin: a function of numpy's and what it was given, an array
    of which this one is a view."""

    __slots__ = ("__weakref__", "alone", "arrays", "bins", "domain", "numbers", "origin", "proxy", "version")
    reason = "numpy array that the graph makes"
    hint = "use torch's operators on the tensor, or .tolist() for plain numbers"

    def __init__(self, arrays: Arrays, proxy: TensorProxy, alone: bool = False, origin: Origin | None = None):
        self.arrays, self.domain, self.proxy, self.alone = arrays, arrays.domain, proxy, alone
        self.origin = origin
        self.numbers: list[ArrayNumber] = []  # as they were when the tensor had this version
        self.version: float | None = None
        self.bins: int | None = None  # how many numbers, where that depends on the data and is held to this

    @property
    def kind(self) -> type:
        return numpy().ndarray

    @property
    def described(self) -> str:
        return f"ndarray ({self.proxy.describe()})"

    @property
    def fake(self) -> torch.Tensor:
        return self.proxy.fake

    def attribute(self, name: str) -> Any:
        fake = self.fake
        if name in (METHODS if self.of_integers() else NUMBERS) or is_array_method(name):
            return self.arrays.made(ArrayMethod(self, name))
        if name == "shape" and not any(map(torch_private.depends_on_values, fake.shape)):
            return self.arrays.made(tuple(fake.shape))
        if name == "size" and is_kind(size := fake.numel(), int):
            return size
        if name == "ndim":
            return fake.dim()
        if name == "T":
            return self.follow("attribute T", numpy().transpose, [self], {})
        self.refuse(f"attribute {name}")

    @property
    def calls(self) -> Calls:
        return self.arrays.calls

    def follow(self, what: str, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """What numpy computes of it, as a node; a graph break where that is not followed."""
        found = self.calls.call(function, args, kwargs)
        return self.refuse(what) if found is ABSENT else found

    def share(self) -> None:
        """A tensor of the program's lies in its memory from now on."""
        self.alone = False
        for part in self.origin[1] if self.origin is not None else ():
            if type(part) is Array:
                part.share()

    def of_integers(self) -> bool:
        return self.fake.dtype is torch.int64 and self.fake.dim() > 0

    def number(self) -> Any:
        """The number that it is, as Python's, where it has no axis: what ``float(array)`` reads."""
        if self.fake.dim():
            self.refuse("the number")
        return self.arrays.method(self, "item", [], {})

    def truth(self) -> bool:
        return self.domain.truth(self.operand("the truth"))

    def binary(self, op: str, left: Any, right: Any) -> Any:
        """Of an array without an axis it is what numpy's number gives."""
        if op.endswith("=") and left is self:
            return self.written_with(op, right)
        op = op.removesuffix("=")
        if (found := self.calls.operator(op, left, right)) is not ABSENT:
            return found
        return self.domain.binary(op, *self.operands(op, left, right))

    def written_with(self, op: str, right: Any) -> Array:
        """``array += right``, where numpy's sum is of the array's own type and sizes."""
        found = self.calls.operator(op.removesuffix("="), self, right)
        fits = type(found) is Array and found.fake.dtype is self.fake.dtype and found.fake.shape == self.fake.shape
        if not fits or not self.alone:
            self.refuse(op)
        self.calls.write(self, found)
        return self

    def compare(self, op: str, left: Any, right: Any) -> Any:
        if (found := self.calls.operator(op, left, right)) is not ABSENT:
            return found
        return self.domain.compare(op, *self.operands(op, left, right))

    def operands(self, what: str, *values: Any) -> list[Any]:
        """Numbers in the place of arrays without an axis, where all else are numbers."""
        found = [value.operand(what) if type(value) is Array else value for value in values]
        if not all(type(value) is ArrayNumber or number_kind(value) in OPERANDS for value in found):
            self.refuse(what)
        return found

    def operand(self, what: str) -> Any:
        """The number of numpy's that it is in arithmetic."""
        return self.refuse(what) if self.fake.dim() else self.arrays.item(self, ())

    def length(self) -> int:
        if not self.fake.dim():
            self.refuse("the length")
        size: Any = self.fake.shape[0]
        if torch_private.depends_on_values(size):
            size = self.size()
        return self.refuse("the length") if size is None else size

    def size(self) -> int | None:
        """How many numbers, None if only the running step knows. Of ``bincount`` without ``minlength`` it is taken that
        the last expert has a token, under a guard on the data (a branch that may leave the graph)."""
        size = self.fake.shape[0]
        if is_kind(size, int):
            return size
        if self.bins is None and (bins := most_bins(self.proxy.node)) is not None and bins <= FEW:
            try:
                self.bins = bins if self.arrays.has_length(size, bins) else None
            except Break:
                self.refuse("the length")
        return self.bins

    def elements(self) -> list[ArrayNumber]:
        """The numbers that it holds now, if these are few and known how many."""
        tensors, fake = self.arrays.tensors, self.fake
        count = self.size() if fake.dim() == 1 and self.of_integers() else None
        if count is None or count > FEW:
            self.refuse("the numbers")
        version = self.arrays.age(self)
        if self.version != version:
            if tensors.writer.scope.parent is not None:
                self.refuse("the numbers, in a loop over experts or behind a branch on values,")
            unknown = [unknown_number(tensors.world, self.proxy) for _ in range(count)]
            values = tensors.record("call_function", array_numbers, (self.proxy,), {}, unknown)
            self.numbers, self.version = [self.arrays.number(value) for value in values], version
        return self.numbers

    def item(self, key: Any) -> Any:
        if type(key) is int and self.of_integers():
            found = self.elements()
            return found[key] if -len(found) <= key < len(found) else self.refuse(f"number {key}")
        parts = key if type(key) is tuple else (key,)
        if len(parts) == self.fake.dim() and all(type(part) in (int, torch.SymInt) for part in parts):
            return self.arrays.item(self, parts)
        return self.part(key)

    def part(self, key: Any) -> Array:
        """Rows: a view, or what an array chooses."""
        found = self.calls.part(self, key)
        if found is None:
            return self.refuse("an item")
        if type(key) is slice and self.version == self.arrays.age(self) and self.numbers:
            self.arrays.hold(found, self.numbers[key])
        return found

    def iterate(self) -> Any:
        if not self.is_of_counts():
            if not self.fake.dim() or not is_kind(self.fake.shape[0], int):
                self.refuse("the rows")
            return self.arrays.made(ArrayRows(self, self.arrays.objects))
        if self.size() is None:
            return self.arrays.rows(self.proxy)
        self.elements()  # before zip() and its like take an item of anything else: see ``can_ask_again``
        return self.arrays.made(ArrayRows(self, self.arrays.objects))

    def is_of_counts(self) -> bool:
        """Whether its items are ints in a row."""
        return self.fake.dim() == 1 and self.of_integers()

    def call_method(self, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        return self.arrays.method(self, name, args, kwargs)

    def expression(self, emitter: Residual) -> Expression:
        if self.origin is not None:
            function, args, named = self.origin
            given = tuple((name, emitter.value(value)) for name, value in named.items())
            return emitter.call(function, *args)._replace(named=given)
        array = method(emitter.value(self.proxy), "numpy")
        return method(array, "copy", Literal("K")) if self.alone else array  # (with its layout)


class ArrayMethod(BoundMethod):
    """``array.name``, not yet called."""


class ArrayRows(SymbolicObject):
    """``iter(array)`` of a known length; at: the position that comes next."""

    kind = ITERATOR

    def __init__(self, array: Array, objects: Objects):
        self.array, self.objects, self.at = array, objects, 0

    def iterate(self) -> Any:
        return self

    def advance(self) -> Any:
        """The number that the array holds now: the loop may have written into the tensor."""
        self.objects.touch(self)
        if self.at >= self.array.length():
            return STOP
        self.at += 1
        array, at = self.array, self.at - 1
        return array.elements()[at] if array.is_of_counts() else array.item(at)

    def expression(self, emitter: Residual) -> Expression:
        name = emitter.fresh()
        emitter.lines.append(Write(name, Call("iter", (emitter.value(self.array),))))
        emitter.lines.append(method(name, "__setstate__", Literal(self.at)))
        return name


class Arrays:
    """All numpy arrays of one trace."""

    def __init__(self, domain: Domain):
        self.domain, self.tensors, self.objects = domain, domain.tensors, domain.objects
        self.calls: Calls  # what numpy computes of them
        self.lengths: set[Any] = set()  # symbols of how many bins there are: most often as many as experts

    def made(self, value: Any) -> Any:
        return self.objects.made(value)

    def array(self, proxy: TensorProxy, alone: bool = False, origin: Origin | None = None) -> Array:
        return self.made(Array(self, proxy, alone, origin))

    def hold(self, array: Array, numbers: list[ArrayNumber]) -> None:
        """It is known what a new array, or a new view, of integers holds by now."""
        array.numbers, array.version = numbers, self.age(array)

    def age(self, array: Array) -> float:
        """How often its memory was written into."""
        return self.tensors.world.writes_into(array.fake)

    def rows(self, proxy: TensorProxy) -> Any:
        return self.domain.loops.array_rows(proxy)

    def has_length(self, size: torch.SymInt, bins: int) -> bool:
        """Whether there are so many bins, under a guard."""
        self.lengths.add(torch_private.expression(size))
        return bool(self.tensors.symbolic_truth(size == bins))

    def number(self, value: Any, certain: bool = True, bounded: bool = True) -> ArrayNumber:
        return self.made(ArrayNumber(self, value, certain, bounded))

    def of_tensor(self, proxy: TensorProxy, args: list, kwargs: dict[str, Any]) -> Array | None:
        """``proxy.numpy()``, None where it is not followed."""
        fake = proxy.fake
        plain = proxy.cls is torch.Tensor and fake.dtype in KINDS and fake.device.type == "cpu"
        plain = plain and fake.layout is torch.strided and not fake.is_neg() and not fake.requires_grad
        if args or kwargs or not plain or not self.tensors.whole_step or numpy() is None or fake.is_inference():
            return None  # (in inference mode nobody counts what is written)
        return self.array(proxy)

    def decides_a_branch(self) -> bool:
        """Whether what the running instruction, a comparison, gives is at once asked for its truth."""
        frame = self.domain.machine.frame
        assert frame is not None
        instructions = frame.program.instructions
        if not instructions[frame.pc].opname.startswith("COMPARE_OP"):
            return False
        following = next((i.opname for i in instructions[frame.pc + 1 : frame.pc + 6] if i.opname not in FEEDS), "")
        return following in BRANCHES or following in ("TO_BOOL", "UNARY_NOT")

    def method(self, array: Array, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """``array.name(*args, **kwargs)``."""
        proxy, bare = array.proxy, not args and not kwargs
        if name in NUMBERS and bare:
            return self.made(self.domain.calls.tensor_method(proxy, name, [], {}))
        if array.of_integers():  # (of which torch's operators tell more)
            along = bare or (args, kwargs) in (([0], {}), ([], {"axis": 0}))
            if name == "cumsum" and along and proxy.fake.dim() == 1:
                return self.array(self.tensors.method(proxy, name, (0,), {}))
            if name in ("sum", "max", "min") and bare:
                whole = self.tensors.method(self.tensors.method(proxy, name, (), {}), "view", (1,), {})
                return self.array(whole).item(0)
            if name in COPIES and bare:
                proxy = self.tensors.method(proxy, "clone", (), {"memory_format": torch.contiguous_format})
                return self.array(proxy if name == "copy" else self.tensors.method(proxy, "view", (-1,), {}))
        function = getattr(numpy().ndarray, name)
        if name == "ravel" and bare and proxy.fake.is_contiguous():
            return self.array(self.tensors.method(proxy, "view", (-1,), {}), origin=(function, [array], {}))
        return array.follow(f"{name}() with these arguments", function, [array, *args], kwargs)

    def item(self, array: Array, key: tuple) -> Any:
        """``array[key]``, an int for each axis: a number that only the running step knows."""
        dtype = array.fake.dtype
        if dtype is torch.int64 and not key:
            return self.number(self.tensors.item(array.proxy), bounded=False)
        sizes = zip(key, array.fake.shape, strict=True)
        known = all(type(at) is type(size) is int and -size <= at < size for at, size in sizes)
        if not known or not (dtype.is_floating_point or dtype is torch.bool):
            array.refuse("an item")
        one = array_item(torch.ones((), dtype=dtype, device="cpu"))
        numbers = self.tensors.numbers
        return numbers.of_array(array_item, (array.proxy, *key), one if dtype is torch.bool else one / 2)

    def function(self, function: Any, args: list, kwargs: dict[str, Any]) -> Array:
        """A function of numpy's on an array."""
        array: Array = args[0]
        if not array.of_integers():
            return array.follow(f"numpy.{getattr(function, '__name__', 'a function')}()", function, args, kwargs)
        found, proxy, alone = numpy(), array.proxy, len(args) == 1 and not kwargs
        if function is found.unique and alone:
            return self.array(self.tensors.function(torch.unique, (proxy,), {}))
        if function is found.cumsum and alone and proxy.fake.dim() == 1:
            return self.array(self.tensors.function(torch.cumsum, (proxy, 0), {}))
        least = kwargs.get("minlength", 0)
        counts = function is found.bincount and len(args) == proxy.fake.dim() == 1 and kwargs.keys() <= {"minlength"}
        if counts and type(least) is int:
            return self.array(self.tensors.function(torch.bincount, (proxy,), {"minlength": least}))
        return array.follow(f"numpy.{getattr(function, '__name__', 'a function')}()", function, args, kwargs)


def most_bins(node: fx.Node) -> int | None:
    """How many bins ``bincount`` of a routing index gives at most, through copies and running sums of them."""
    while node.target in ("cpu", "cumsum", "clone", torch.cumsum) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    call = read_call(node)
    if call is None or call.name != "bincount" or call["weights"] is not None or call["minlength"] != 0:
        return None
    index = call["input"]
    bounds = index_bounds(index) if is_kind(index, fx.Node) else None
    return bounds[1] if bounds is not None and bounds[0] == 0 else None


def is_small(value: Any) -> bool:
    """Whether numpy's sum with it, in 64 bits, is Python's."""
    if type(value) is ArrayNumber:
        return value.bounded
    return type(value) is torch.SymInt or (type(value) is int and -MOST < value < MOST)


def plain(value: Any) -> Any:
    """A numpy number as the int that it is."""
    return value.value if type(value) is ArrayNumber else value


HELD = (Array, ArrayNumber, OpaqueTensor, slice, tuple, list)


def without_arrays(value: Any) -> Any:
    """An operator's argument with ints in the place of numpy's numbers, which torch takes in the same way."""
    kind = type(value)
    if kind is ArrayNumber:
        return value.value
    if is_kind(value, Array | OpaqueTensor):
        value.refuse("a tensor made of it, or its use in an operator,")
    if kind in (tuple, list) and any(is_kind(v, HELD) for v in value):
        return kind(without_arrays(v) for v in value)
    if kind is slice:
        return slice(without_arrays(value.start), without_arrays(value.stop), without_arrays(value.step))
    return value
