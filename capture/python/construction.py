"""Making objects: ``cls(...)`` as ``type.__call__`` does it, and the builtin containers."""

from __future__ import annotations

import abc
import collections
import functools
import inspect
import random
import types
import typing
import weakref
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributions

from moebius.interpreter import Frame, is_kind
from moebius.interpreter.domain.core import special, type_name
from moebius.interpreter.forms.frames import implicit

from ..heap.lifetimes import OBSERVED
from ..heap.records import DICTS, FACTORY, FILLED_BY_C, HEAP_TYPE, derived_from, made_by_c
from ..hook import ABSENT
from ..tensors.index_lists import index_range
from ..torch_facts import torch_private
from ..values.numbers import numpy_numbers_in
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.rows import TensorRows
from ..values.values import Break, TensorProxy, type_of
from . import natives
from .numpy_calls import of_numbers
from .open_sets import open_set
from .originals import EMPTY, TENSOR
from .parts import CallParts
from .stepped_ranges import stepped

LAZY: Any = torch.distributions.utils.lazy_property.__get__
NUMBER_TYPES = NUMPY_NUMBERS | {bool, int, float, complex}
SEEDED: Any = random.Random.__new__
NUMBERS = (int, float, bool, torch.SymInt)
PARAMETER = inspect.signature(torch.nn.Parameter)
# Classes whose own C code lays objects out in a way that we can follow.
IS_ABSTRACT = 1 << 20  # Py_TPFLAGS_IS_ABSTRACT
ALLOCATED = (object, dict, collections.OrderedDict, collections.defaultdict, list, set, tuple, int, str, float,
             types.SimpleNamespace)  # fmt: skip


@dataclass
class Making:
    """The call of a class that has come to ``__init__``, whose code is ``init``."""

    cls: type
    init: types.CodeType
    made: Any


class Construction(CallParts):
    """Calls that make objects."""

    def construct(self, cls: type, args: list, kwargs: dict[str, Any], asks_metaclass: bool = True) -> Any:
        """``cls(*args, **kwargs)``; without asking a ``__call__`` of the metaclass, what ``type.__call__`` does."""
        if cls is type and len(args) == 1:
            return self.kind_of(args[0])
        if cls in NUMPY_NUMBERS or (cls is complex and numpy_numbers_in(args)):
            if (found := of_numbers(self.domain, cls, args, kwargs)) is not ABSENT:
                return found
        if cls is range and (found := index_range(self.tensors, args)) is not None:
            return self.objects.made(found)
        if cls is range and not kwargs and (items := stepped(self.domain, args)) is not None:
            return items
        if cls in natives.PLAIN_TYPES:
            values = [self.domain.plain_contents(a) for a in args]
            if cls in (frozenset, torch.Size) and values:
                values = [list(self.members(values[0])) if cls is frozenset else self.drain(values[0])]
                if cls is frozenset and (made := open_set(self.domain, cls, values[0])) is not None:
                    return made
            if cls is torch.Size and all(type(v) in (int, torch.SymInt) for value in values for v in value):
                return torch.Size(*values)
            if cls is not slice:
                values = [natives.specialised(v, self.known) for v in values]
            if not all(natives.is_plain(v, self.known) for v in (*values, *kwargs.values())):
                if cls in (slice,):
                    return slice(*values)
                raise Break(
                    "plain value from other values",
                    f"{cls.__name__}() of {', '.join(type_of(a).__name__ for a in args)}",
                    "pass plain values",
                )
            return self.objects.made(cls(*values, **kwargs))
        if cls in natives.SHALLOW:
            return self.shallow(cls, args, kwargs)
        if cls is types.MappingProxyType and len(args) == 1 and type(args[0]) in DICTS:
            shown = self.objects.made(types.MappingProxyType(args[0]))
            self.objects.behind[id(shown)] = args[0]
            return shown
        if cls is weakref.ref and len(args) == 1 and (self.known(args[0]) or self.objects.is_new(args[0])):
            if (record := self.objects.record_of(args[0])) is not None:  # (it is hashed by that)
                self.objects.pin(record, "the same referent")
            return self.objects.made(weakref.ref(args[0]))
        if issubclass(cls, torch.Tensor):
            if cls is torch.nn.Parameter:
                try:
                    return self.parameter(**PARAMETER.bind(*args, **kwargs).arguments)
                except TypeError as error:  # whose words are the function's that raises it
                    raise Break("parameter made in the step", str(error), "make parameters before the step") from None
            if cls is torch.nn.Buffer:
                raise Break("parameter made in the step", cls.__name__, "make parameters before the step")
            if cls is torch.Tensor and not kwargs:
                return self.old_constructor(torch.get_default_dtype(), args)
            raise Break("tensor constructor", f"{cls.__name__}(...)", "use torch.tensor")
        if is_kind(cls, torch_private.LEGACY_TYPE) and not kwargs:
            if cls.layout is torch.strided and not cls.is_cuda:
                return self.old_constructor(cls.dtype, args)
        if cls is torch.autograd.Variable and (made := self.legacy_variable(*args, **kwargs)) is not None:
            return made
        if issubclass(cls, torch.autograd.Function):
            raise Break("autograd.Function instance", cls.__name__, "call .apply")
        meta_call = self.attributes.on_type(type(cls), "__call__")
        if asks_metaclass and not is_kind(meta_call, types.WrapperDescriptorType):
            return self.call(self.attributes.bind(meta_call, cls, type(cls)), args, kwargs)
        return self.type_call(cls, args, kwargs)

    def made_by_alias(self, alias: types.GenericAlias, args: list, kwargs: dict[str, Any]) -> Any:
        """``dict[str, int](…)``: what the class makes, which is told of the alias where it has attributes; ABSENT where
        the class says what becomes of them (``ga_call``, Objects/genericaliasobject.c)."""
        cls: Any = alias.__origin__
        look_up = self.attributes.on_type
        if look_up(cls, "__setattr__") is not object.__setattr__ or look_up(cls, "__orig_class__") is not ABSENT:
            return ABSENT
        made = self.call(cls, args, kwargs)
        if type_of(made).__dictoffset__:
            self.attributes.set(made, "__orig_class__", alias)
        return made

    def lazy_property(self, lazy: Any, instance: Any, owner: Any = None) -> Any:
        """``Categorical.probs`` of the class, at which each distribution looks: a property, made anew each time."""
        if instance is not None:
            return self.domain.call_function(LAZY, [lazy, instance, owner], {})
        self.attributes.get(lazy, "wrapped")
        return self.objects.made(LAZY(lazy, None, owner))

    def parameter(self, data: Any = None, requires_grad: Any = True) -> Any:
        """``torch.nn.Parameter(data, requires_grad)``: a leaf over the tensor's memory."""
        made = self.call(EMPTY, [0], {}) if data is None else data
        plain = is_kind(made, TensorProxy) and (made.fake.is_floating_point() or made.fake.is_complex())
        if not plain or type(requires_grad) is not bool:
            detail = f"Parameter of {type_of(made).__name__}, {type_of(requires_grad).__name__}"
            raise Break("parameter made in the step", detail, "make parameters before the step")
        made = self.tensors.function(torch.nn.Parameter, (made, False), {})
        return self.tensors.method(made, "requires_grad_", (True,), {}) if requires_grad else made

    def legacy_variable(self, tensor: Any = None, requires_grad: Any = False, *others: Any, **named: Any) -> Any:
        """``Variable(tensor)`` (``THPVariable_pynew``, torch/csrc/autograd/python_legacy_variable.cpp); None if not
        followed."""
        if others or named or not is_kind(tensor, TensorProxy) or type(requires_grad) is not bool:
            return None
        made = self.tensors.method(tensor, "detach", (), {})
        return self.tensors.method(made, "requires_grad_", (True,), {}) if requires_grad else made

    def as_it_is(self, args: list, kwargs: dict[str, Any]) -> Any:
        """``torch.as_tensor`` of a tensor: itself, or ``to``; None if not followed."""
        if len(args) != 1 or not is_kind(args[0], TensorProxy) or not kwargs.keys() <= {"dtype", "device"}:
            return None
        told = {name: value for name, value in kwargs.items() if value is not None}
        return self.tensors.method(args[0], "to", (), told) if told else args[0]

    def old_constructor(self, dtype: torch.dtype, args: list) -> Any:
        """``torch.Tensor([2.0])``, ``torch.LongTensor(2, 3)``: of Python's numbers, an array, and of sizes, with memory
        that nothing has written (``legacy_tensor_generic_ctor_new``, torch/csrc/utils/tensor_new.cpp)."""
        if torch_private.is_default_device(torch.device("cpu")):
            if all(type(arg) in (int, torch.SymInt) for arg in args):
                return self.call(EMPTY, [*args] or [0], {"dtype": dtype})
            if len(args) == 1 and type(args[0]) in (list, tuple) and self.holds_numbers(args[0]):
                return self.call(TENSOR, args, {"dtype": dtype})
            if (made := self.array_inputs.made_from(torch.as_tensor, None, args, {"dtype": dtype})) is not None:
                return made  # (over the array's memory, if the type is the same)
        raise Break("tensor constructor", "of something else than sizes or Python's numbers", "use torch.tensor")

    def holds_numbers(self, values: Any) -> bool:
        """Whether a list is one of numbers that are known, or of such lists."""
        return all(
            self.holds_numbers(value) if type(value) in (list, tuple) else type(value) in NUMBERS
            for value in self.objects.contents(values)
        )

    def type_call(self, cls: type, args: list, kwargs: dict[str, Any]) -> Any:
        """``type.__call__(cls, ...)``: ``__new__``, then ``__init__`` if an instance of the class came back."""
        caller = self.domain.frame
        if caller in self.domain.making:  # one class made while another one's call goes through its arguments
            return self.make_instance(cls, args, kwargs, None)
        self.domain.making[caller] = None
        try:
            return self.make_instance(cls, args, kwargs, caller)
        finally:
            del self.domain.making[caller]

    def make_instance(self, cls: type, args: list, kwargs: dict[str, Any], caller: Frame | None) -> Any:
        """The same. caller: whose instruction does nothing but this."""
        maker = self.attributes.on_type(cls, "__new__")
        if is_kind(maker, staticmethod):
            maker = self.attributes.inside(maker, maker.__func__)
        if is_kind(maker, types.FunctionType):
            made = self.call(maker, [cls, *args], kwargs)
        else:
            made = self.allocate(cls, maker, args, kwargs)
        if cls not in type_of(made).__mro__:  # (whatever its metaclass says of subclasses)
            return made
        if args or kwargs:
            check_object_arguments(cls)
        init = self.attributes.on_type(type(made), "__init__")
        if is_kind(init, types.FunctionType):
            if caller is not None:
                self.domain.making[caller] = Making(cls, init.__code__, made)
            given = self.call(init, [made, *args], kwargs)
            if given is not None:
                raise TypeError(f"__init__() should return None, not '{type_of(given).__name__}'")
        elif is_kind(made, FILLED_BY_C):
            self.object_init(made, *args, **kwargs)
        return made

    def allocate(self, cls: type, maker: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``__new__`` of a class whose allocation is C's."""
        if issubclass(type(cls), abc.ABCMeta) and maker is object.__new__:  # (dict's does not ask)
            self.attributes.on_type(cls, "__abstractmethods__")
            if cls.__flags__ & IS_ABSTRACT:
                object.__new__(cls)  # raises what says which methods
        if special(cls, "__del__") is not None:
            raise Break(
                "object with a finalizer",
                f"{cls.__module__}.{cls.__qualname__}.__del__ runs when the object dies, which tracing does not see",
                "make it outside of the step",
                OBSERVED,
            )
        if cls is np.dtype and len(args) == 1 and not kwargs and is_kind(args[0], type | str):
            if args[0] in NUMBER_TYPES or is_kind(args[0], str):
                return self.objects.made(np.dtype(args[0]))  # which nobody changes
        base = derived_from(cls, ALLOCATED)
        if issubclass(cls, BaseException):
            return self.objects.made(made_by_c(cls).__new__(cls, *map(self.domain.kept_in_an_exception, args)))
        if cls is random.Random and maker is SEEDED:
            return self.objects.made(SEEDED(cls, 0))  # seeded by its __init__
        if base is None or not owned_by(cls) or (base is object and not made_by_object(cls)):
            raise Break(
                "object made in C",
                f"{cls.__module__}.{cls.__qualname__}",
                HINTS.get(cls.__name__, "it is made natively; make it outside of the step"),
                OBSERVED if issubclass(cls, weakref.ref) and args and self.objects.is_new(args[0]) else "",
            )
        if base is tuple:
            return self.objects.made(tuple.__new__(cast(Any, cls), self.listed(args[0], tuple) if args else ()))
        if base in (int, str, float):
            return self.objects.made(base.__new__(cls, *args, **kwargs))
        if base is object:
            return self.objects.made(object.__new__(cls))
        return self.objects.made(base.__new__(cls))

    def init_container(self, owner: Any, base: Any, args: list, kwargs: dict[str, Any]) -> None:
        if not self.objects.is_new(owner):
            raise Break("container initialised again", type(owner).__name__, "make a new one")
        self.objects.touch(owner)
        if base is collections.defaultdict and args:
            FACTORY.__set__(owner, args[0])
            args = args[1:]
        if base in DICTS:
            entries = self.mapping_or_items(args[0], base) if args else {}
            if base is collections.OrderedDict and self.is_own(type(owner), "__setitem__"):
                return self.set_items(owner, entries, kwargs)
            base.update(owner, entries, **kwargs)
        elif args:
            target = getattr(base, "update", None) or base.extend
            target(owner, self.listed(args[0]) if base is list else list(self.members(args[0])))

    def make_default_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.filled(collections.defaultdict(*args[:1]), args[1:], kwargs)

    def filled(self, made: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if len(args) > 1:
            type(made)(*args)  # Python's own error
        if args:
            made.update(self.mapping_or_items(args[0], type(made)))
        made.update(kwargs)
        return self.objects.made(made)

    def make_set(self, *args: Any) -> Any:
        if len(args) > 1:
            set(*args)  # Python's own error
        if len(args) == 1 and type(args[0]) is TensorRows:  # of a list that tolist() left out
            return args[0]
        items = list(self.members(args[0])) if args else []
        found = open_set(self.domain, set, items)
        return self.objects.made({self.objects.made_key(k) for k in items}) if found is None else found

    def make_partial(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.objects.made(
            functools.partial(function if callable(function) else self.callback(function), *args, **kwargs)
        )

    def make_super(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            args = tuple(implicit(self.domain))
        if len(args) == 2 and type(args[1]) is TensorProxy:
            raise Break("super() of a tensor", "methods of tensor subclasses", "use plain tensors")
        return self.objects.made(super(*args, **kwargs))


def owned_by(cls: type) -> bool:
    """Whether all classes of C code in the MRO are ones whose layout we can follow."""
    solid = [b for b in cls.__mro__ if not b.__flags__ & HEAP_TYPE]
    return all(b in ALLOCATED or b is typing.Generic for b in solid)


def made_by_object(cls: type) -> bool:
    """Whether ``object.__new__`` may make it: it refuses classes whose memory C code lays out (pybind11's, say)."""
    return all(b is object or is_kind(vars(b).get("__new__"), OWN_NEW) for b in cls.__mro__)


# ``__new__`` written in Python, or object's own; a builtin bound to its class is C code's
OWN_NEW = (types.NoneType, types.FunctionType, staticmethod, classmethod)


def check_object_arguments(cls: Any) -> None:
    """Objects/typeobject.c object_new: arguments that neither __new__ nor __init__ takes are an error."""
    if cls.__new__ is object.__new__ and cls.__init__ is object.__init__:
        raise TypeError(f"{type_name(cls)}() takes no arguments")


HINTS = {
    "_ExperimentalConfig": "enter the profiler around the step",
}
