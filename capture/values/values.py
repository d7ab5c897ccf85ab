"""The values that only exist while tracing: tensors as proxies, their methods, and the signal of a graph break."""

from __future__ import annotations

import enum
import operator
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import fx
from torch.nn.attention import SDPBackend

from moebius.interpreter import Signal, is_kind
from moebius.interpreter.domain.operators import OPERATIONS, STEMS

from ..guards.sources import Source
from .expert_numbers import number_of
from .numpy_numbers import NUMPY_NUMBERS
from .residual_program import Attribute, Expression, Residual

# Types whose values are what they print as: no identity that a program could rely on, no parts that could change.
ATOMS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(Ellipsis),
        type(NotImplemented),
        range,
        types.CodeType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.SymInt,
        torch.SymFloat,
        torch.SymBool,
        torch.finfo,
        torch.iinfo,
        SDPBackend,
        *NUMPY_NUMBERS,
    }
)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Objects that are guarded by identity wherever they are found: code and types.
IDENTITIES = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    property,
    staticmethod,
    classmethod,
    enum.Enum,
    types.GenericAlias,
    types.UnionType,
)


# What the running thread is tracing; ``where`` gives the user's stack at the moment, ``frame`` its innermost frame.
TRACING = threading.local()


# How the names of classes begin that stand, while tracing, for an object of another type. An error of C code that has
# one in its words is of tracing; a graph break says what is behind it.
OWN = "moebius "


class Break(Signal):
    """Tracing cannot go on here: the frame is split at this instruction.

    reason: short and stable; detail: what was met; hint: what the user can do. in_each_iteration: why the frame runs
    natively as a whole if it is the one with this instruction: a loop would break the graph in each of its iterations.
    """

    def __init__(self, reason: str, detail: str = "", hint: str = "", in_each_iteration: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail.replace(OWN, "")
        self.hint, self.in_each_iteration = hint, in_each_iteration
        locate = getattr(TRACING, "where", None)
        self.places: tuple | None = locate() if locate is not None else None
        self.frame: Any = TRACING.frame() if locate is not None else None  # the innermost one


@dataclass(frozen=True)
class Body:
    """The graph break where code that has a graph of its own changes what is older: it runs another number of times
    than it is traced, or at another time. detail: with a place for the object's type. lenient: it may go on, and who
    opened the body asks the heap when it is over (``Heap.changes_older``).
    """

    reason: str
    detail: str
    hint: str
    lenient: bool = False


class CannotRebuild(Exception):
    """What lives on after the segment and residual code has no way to make again."""


def refuse_number(self: TensorProxy) -> NoReturn:
    raise Break(
        "tensor read as a number",
        f"the value of a tensor {self.describe()} is needed by Python",
        "keep the number in a tensor (torch.where, a mask), or read it at the end of the step",
    )


def decided_by_data() -> Break:
    what = "Python needs a number that is known only when the step runs"
    return Break("size that depends on values", what, "keep it in shapes, or in a tensor")


class Operations(Protocol):
    """What writes operators down (``tensors.tensors.TensorOperations``)."""

    def function(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any: ...

    def get_item(self, tensor: Any, key: Any) -> Any: ...


class TensorProxy:
    """A tensor while tracing: a fake twin (shape, dtype, strides, requires_grad) and the node that computes it.

    source, real: set when it existed before the call. Operators are those of the traced program: Python code that runs
    natively on our behalf (``sum``, ``functools.reduce``) may add or index proxies.
    """

    __slots__ = (
        "__weakref__", "attributes", "cls", "fake", "is_asked", "node", "operations", "real", "required", "source",
    )  # fmt: skip

    def __init__(self, operations: Operations, fake: torch.Tensor, node: fx.Node):
        self.operations, self.fake, self.node = operations, fake, node
        self.cls: type = torch.nn.Parameter if isinstance(fake, torch.nn.Parameter) else torch.Tensor
        self.source: Source | None = None
        self.required = False  # whether an input required gradients when the step began
        self.real: torch.Tensor | None = None
        self.attributes: dict[str, Any] = {}
        self.is_asked = False  # whether anybody has asked which tensor it is: by ``is``, ``==`` in C, a dict or a set

    def describe(self) -> str:
        """``float32[4, 8]``."""
        sizes = ", ".join("s" if type(size) is torch.SymInt else str(size) for size in self.fake.shape)
        return f"{str(self.fake.dtype).removeprefix('torch.')}[{sizes}]"

    __bool__ = __float__ = __complex__ = __len__ = __iter__ = refuse_number

    def __hash__(self) -> int:
        self.is_asked = True
        return id(self)

    def __eq__(self, other: object) -> bool:
        self.is_asked = True
        return self is other

    def __index__(self) -> int:
        known = number_of(self.node)
        return refuse_number(self) if known is None else known

    __int__ = __index__

    def __getitem__(self, key: Any) -> Any:
        return self.operations.get_item(self, key)


def proxies_in(values: Any) -> list[TensorProxy]:
    """The tensors among some values, and in tuples of them."""
    found = []
    for value in values:
        if type(value) is TensorProxy:
            found.append(value)
        elif is_kind(value, tuple):
            found += proxies_in(value)
    return found


def mapped(value: Any, change: Callable[[Any], Any], made: Callable[[Any], Any] = lambda nest: nest) -> Any:
    """The same nest of plain lists, tuples and dicts, with what ``change`` makes of each leaf. made: told of each."""
    if type(value) in (list, tuple):
        return made(type(value)([mapped(item, change, made) for item in value]))
    if type(value) is dict:
        return made({key: mapped(item, change, made) for key, item in value.items()})
    return change(value)


def replaced(value: Any, by: dict[int, Any]) -> Any:
    """The same nest with other leaves where ``by`` has one for their ids."""
    return mapped(value, lambda leaf: by.get(id(leaf), leaf))


def install_operators() -> None:
    """Give TensorProxy the arithmetic and comparison operators, each recorded as the same operator on the tensor."""

    def binary(name: str, function: Any, swapped: bool) -> None:
        def method(self: TensorProxy, other: Any) -> Any:
            return self.operations.function(function, (other, self) if swapped else (self, other), {})

        setattr(TensorProxy, name, method)

    for op, name in STEMS.items():
        binary(f"__{name}__", OPERATIONS[op], swapped=False)
        binary(f"__r{name}__", OPERATIONS[op], swapped=True)
    for name in ("lt", "le", "gt", "ge"):
        binary(f"__{name}__", getattr(operator, name), swapped=False)
    for name in ("neg", "pos", "abs", "invert"):
        function = getattr(operator, name)
        setattr(TensorProxy, f"__{name}__", lambda self, f=function: self.operations.function(f, (self,), {}))


install_operators()


class TensorMethod:
    """``tensor.name``, not yet called."""

    __slots__ = ("name", "proxy")

    def __init__(self, proxy: TensorProxy, name: str):
        self.proxy, self.name = proxy, name


TensorProxy.__name__, TensorMethod.__name__ = f"{OWN}Tensor", f"{OWN}builtin_function_or_method"


class RuntimeNumber:
    """A Python number that the graph computes (``numbers.Number``)."""

    __slots__ = ()

    @property
    def kind(self) -> type:
        """``type(value)``."""
        raise NotImplementedError

    @property
    def known(self) -> bool:
        """Whether its value of today is known while tracing."""
        raise NotImplementedError


class SymbolicObject:
    """What stands, while tracing, for an object of another type that only the running step has (a numpy array of a
    tensor's). What a program does with it is a graph break, where a subclass says nothing else.
    reason, hint: of that break."""

    __slots__ = ()
    reason = "tensor read as a number"
    hint = "use the tensor itself, or .tolist() for plain numbers"

    def __init_subclass__(cls, named: str = "object") -> None:
        kind = cls.__dict__.get("kind")
        cls.__name__ = OWN + (kind.__name__ if type(kind) is type else named)

    @property
    def kind(self) -> type:
        """``type(value)``."""
        raise NotImplementedError

    @property
    def described(self) -> str:
        """What a report says that it is."""
        return self.kind.__name__

    def refuse(self, what: str) -> NoReturn:
        self.refuse_as(what, self.described)

    @classmethod
    def refuse_as(cls, what: str, described: str) -> NoReturn:
        described = described.removeprefix(OWN)
        article = "an" if described.startswith(("i", "o", "nd")) else "a"
        raise Break(cls.reason, f"{what} of {article} {described} that the graph makes", cls.hint)

    def attribute(self, name: str) -> Any:
        """``value.name``."""
        self.refuse(f"attribute {name}")

    def call(self, args: list, kwargs: dict[str, Any]) -> Any:
        """``value(*args, **kwargs)``."""
        self.refuse("a call")

    def iterate(self) -> Any:
        """``iter(value)``."""
        self.refuse("the items")

    def advance(self) -> Any:
        """``next(value)``; STOP at its end."""
        self.refuse("the next item")

    def item(self, key: Any) -> Any:
        """``value[key]``."""
        self.refuse("an item")

    def length(self) -> Any:
        """``len(value)``."""
        self.refuse("the length")

    def truth(self) -> bool:
        """``bool(value)``."""
        self.refuse("the truth")

    def binary(self, op: str, left: Any, right: Any) -> Any:
        """``left op right``, one of which it is."""
        self.refuse(f"{op}")

    def compare(self, op: str, left: Any, right: Any) -> Any:
        """The same of a comparison."""
        self.refuse(f"{op}")

    def expression(self, emitter: Residual) -> Expression:
        """What makes, once the step has run, what it stands for."""
        raise CannotRebuild(f"a {type(self).__name__} is alive across a graph break")


class BoundMethod(SymbolicObject):
    """``owner.name`` of such an object that has ``call_method``, not yet called."""

    kind = types.BuiltinMethodType

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name

    def call(self, args: list, kwargs: dict[str, Any]) -> Any:
        return self.owner.call_method(self.name, args, kwargs)

    def expression(self, emitter: Residual) -> Expression:
        return Attribute(emitter.value(self.owner), self.name)


class UndefinedAfterLoop:
    """A local that only an expert loop's last iteration would have set. Using it after the loop is a graph break."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


def is_of_one_number(value: Any) -> bool:
    """Whether it is a plain number, or a tensor that Python can compare as one."""
    if type(value) is TensorProxy:
        return value.fake.numel() == 1 and not value.fake.is_complex()
    return type(value) in (int, float, bool)


def type_of(value: Any) -> type:
    """``type(value)`` as the user's program would see it."""
    kind = type(value)
    if issubclass(kind, TensorProxy):
        return value.cls
    if issubclass(kind, SYMBOLIC):
        return int if issubclass(kind, torch.SymInt) else bool if issubclass(kind, torch.SymBool) else float
    if issubclass(kind, TensorMethod):
        return types.BuiltinMethodType
    if issubclass(kind, RuntimeNumber | SymbolicObject):
        return value.kind
    return kind
