"""What is known of an object that existed before the call, and the kinds of containers that there are."""

from __future__ import annotations

import collections
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import lookup

from ..guards.sources import Source
from ..hook import ABSENT
from ..values.values import TensorProxy

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
FACTORY: Any = vars(collections.defaultdict)["default_factory"]
LISTS = (list, collections.deque)
SETS = (set,)
CONTAINERS = frozenset((*DICTS, *LISTS, *SETS))
FILLED_BY_C = (*CONTAINERS, BaseException, types.SimpleNamespace)  # whose ``__init__`` in C leaves something in them
WITH_ITEMS = frozenset((*CONTAINERS, tuple, frozenset))
VIEWS: tuple[type, ...] = tuple(
    type(getattr(kind(), name)()) for kind in (dict, collections.OrderedDict) for name in ("keys", "values", "items")
)
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: an instance of such a class can be given another class
# Keys that hash and compare without running anybody's code, and objects that hash by identity.
PLAIN_KEYS = (str, int, float, bytes, bool, type(None), type, types.FunctionType, torch.dtype, torch.device)


# Constants that are the same in every place where they are found (a float may be a learning rate).
SIMPLE = frozenset((str, int, bool, type(None), type(ABSENT)))
UNREAD = object()  # no value is this one: the place was not read, so nothing guards what it held


def may_be_asked_for(value: Any) -> bool:
    """Whether it may be one that a block is given (``x is Config.first``): such a read is logged everywhere."""
    return type(value) is TensorProxy or type(value) in CONTAINERS or is_kind(value, (tuple, torch.nn.Module))


@dataclass
class MetTuple:
    """A tuple that existed before, original. entered: what stands for it in the trace. places: where it was found."""

    original: Any
    entered: Any
    places: list[Source]


class Record:
    """What is known of an object that existed before the call.

    reads: parts already entered, by key; writes: for a dict, keys written without the whole having been read, in the
    order in which that made them; moved: those of them that were there, were deleted and came again, last;
    appends: the same for a list; operations: of a set, its methods with their argument; shadow: stands for the
    container from the first whole read on; late: writes at keys that only the running step knows, or that it may not
    come to.
    """

    __slots__ = (
        "appends", "instance_dict", "late", "moved", "obj", "operations", "original", "reads", "shadow", "source",
        "writes",
    )  # fmt: skip

    def __init__(self, obj: Any, source: Source):
        self.obj, self.source = obj, source
        self.reads: dict[Any, Any] = {}
        self.writes: dict[Any, Any] = {}
        self.moved: frozenset[Any] = frozenset()
        self.appends: list[Any] | None = None  # most objects are only read: no containers for those
        self.operations: tuple[tuple[str, Any], ...] = ()
        self.late: list[Any] | None = None  # (``conditional_writes.Write``)
        self.shadow: Any = None
        self.original: Any = None
        self.instance_dict: Record | None = None

    @property
    def changed(self) -> bool:
        """Whether the residual code has something to replay here."""
        return bool(self.late) or self.changed_at_plain_keys

    @property
    def changed_at_plain_keys(self) -> bool:
        """The same of keys and places that tracing knows."""
        if self.shadow is None:
            if not self.writes:
                return bool(self.appends or self.moved)
            written = any(self.reads.get(k, UNREAD) is not v for k, v in self.writes.items())
            return written or bool(self.appends or self.moved)
        if type(self.shadow) in DICTS:
            return not same_items(self.original.items(), self.shadow.items())
        if type(self.shadow) in SETS:
            return bool(self.operations)
        return len(self.shadow) != len(self.original) or any(
            a is not b for a, b in zip(self.shadow, self.original, strict=True)
        )


def same_items(first: Iterable[tuple[Any, Any]], second: Iterable[tuple[Any, Any]]) -> bool:
    """Same keys with the same objects in the same order."""
    a, b = list(first), list(second)
    return len(a) == len(b) and all(k is q and v is w for (k, v), (q, w) in zip(a, b, strict=True))


def whole_items(container: Any) -> tuple[Any, ...]:
    """Everything that reading a whole container tells: keys and values in order, or items in order."""
    if is_kind(container, dict):
        return tuple(part for item in container.items() for part in item)
    if is_kind(container, set):
        return tuple(sorted(container, key=id))
    return tuple(container)


def contents_of(cell: types.CellType) -> Any:
    """The cell's contents, ABSENT if empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def slot_of(slot: Any, obj: Any) -> Any:
    """What an object's slot, or what C code keeps for it, holds; ABSENT if nothing."""
    try:
        return slot.__get__(obj, type(obj))
    except AttributeError:
        return ABSENT


def members(cls: type) -> list[types.MemberDescriptorType]:
    """The slots that a class and its bases define."""
    return [d for base in cls.__mro__ for d in vars(base).values() if type(d) is types.MemberDescriptorType]


def made_by_c(cls: type) -> Any:
    """The class in C that makes objects of a class of the user's."""
    return next(base for base in cls.__mro__ if not base.__flags__ & HEAP_TYPE)


def derived_from(cls: type, kinds: Collection[type]) -> Any:
    """The first of these classes in C that a class is or is derived from, else None."""
    return next((base for base in cls.__mro__ if base in kinds), None)


def with_items(cls: type) -> Any:
    """The container in C that a class is or is derived from, else None."""
    return derived_from(cls, WITH_ITEMS)


def raw_items(value: Any) -> Any:
    """The items of a container, as those that iterating gives, without running any of the user's code."""
    base = with_items(type(value))
    return value if base in (None, type(value)) else list(base.__iter__(value))


def raw_dict(obj: Any) -> dict | None:
    """The instance dict itself, without running any of the user's code; None if there is none."""
    try:
        namespace = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return None
    return namespace if is_kind(namespace, dict) else None


def python_method(cls: type, name: str) -> bool:
    """Whether looking ``name`` up on the class finds a Python function."""
    return is_kind(lookup(cls, name), types.FunctionType)
