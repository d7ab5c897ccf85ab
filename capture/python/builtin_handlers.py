"""Builtins that are operations of the domain: isinstance, getattr, len, sorted, int, str, and object's methods."""

from __future__ import annotations

import abc
import functools
import json
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from typing_extensions import get_protocol_members

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import special, type_name

from ..heap.records import CONTAINERS, derived_from, made_by_c, with_items
from ..hook import ABSENT
from ..tensors.array_inputs import is_array
from ..tensors.arrays import Array, ArrayNumber
from ..tensors.bounds import Bound
from ..tensors.counts import INTEGERS
from ..tensors.eithers import Either
from ..tensors.fakes import refuse_doubtful
from ..torch_facts import torch_private, torch_sizes
from ..values.numbers import PLAIN_NUMBERS, Number, number_kind
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.opaque_tensor import OpaqueTensor
from ..values.rows import TensorRows
from ..values.values import (
    ATOMS,
    SYMBOLIC,
    Break,
    SymbolicObject,
    TensorMethod,
    TensorProxy,
    UndefinedAfterLoop,
    is_of_one_number,
    type_of,
)
from . import natives
from .enums import plain_member
from .own_hashes import own_key
from .parts import CallParts
from .substitutes import largest, smallest

FLOATING = (float, complex, torch.SymFloat)
ABSTRACT_CHECKS = {name: vars(abc.ABCMeta)[name] for name in ("__instancecheck__", "__subclasscheck__")}


def is_added_in_c(kind: type) -> bool:
    """Whether ``sum`` adds numbers of this type, or of one that it is made from, without asking them."""
    asks = not issubclass(kind, SYMBOLIC) and any(special(kind, name) is not None for name in ("__add__", "__radd__"))
    return issubclass(kind, (int, torch.SymInt, *FLOATING)) and not asks


class BuiltinHandlers(CallParts):
    """What stands for a builtin while tracing."""

    def kind_of(self, value: Any) -> type:
        kind = type_of(value)
        self.attributes.type_guard(value)
        return kind

    def is_instance(self, value: Any, classes: Any, asks_metaclass: bool = True) -> bool:
        self.attributes.on_type(self.kind_of(value), "__class__")  # guards the bases
        if is_kind(classes, tuple | types.UnionType):
            return any(self.is_instance(value, c) for c in (classes if is_kind(classes, tuple) else classes.__args__))
        check = self.own_check(classes, "__instancecheck__")
        kind = type(value)
        if kind is TensorProxy:
            if asks_metaclass and self.has_own_check(classes, check):
                return self.domain.truth(self.call(check, [classes, value], {}))
            if is_kind(classes, torch_private.LEGACY_TYPE):  # torch.FloatTensor says no to a fake
                if value.fake.device.type != "cpu":
                    where = f"isinstance() of a tensor on {value.fake.device}"
                    raise Break("legacy tensor type", where, "ask its dtype")
                return isinstance(torch.empty(0, dtype=value.fake.dtype, device="cpu"), classes)
            if is_kind(value.real, torch.Tensor):
                return isinstance(value.real, classes)
            return issubclass(value.cls, classes)
        if issubclass(kind, OpaqueTensor) and self.has_own_check(classes, check, trusting=False):
            value.refuse("isinstance()")  # (torch marks tensors as parameters)
        if issubclass(kind, (*SYMBOLIC, Number, SymbolicObject)):
            return self.is_subclass_of(type_of(value), classes)
        if issubclass(kind, TensorMethod | UndefinedAfterLoop):
            return False
        answers = kind not in ATOMS and is_kind(classes, type) and self.answers_for_class(kind)
        if not asks_metaclass:
            return self.is_of_type(value, classes) if answers else type.__instancecheck__(classes, value)
        if self.has_own_check(classes, check, trusting=not answers) and kind is not classes:
            return self.domain.truth(self.call(check, [classes, value], {}))
        if answers and kind is not classes:
            return self.is_of_type(value, classes)
        if getattr(classes, "_is_protocol", False) is True and kind.__dictoffset__:
            return self.has_members(value, classes)
        return self.is_subclass_of(type(value), classes)

    def has_members(self, value: Any, protocol: type) -> bool:
        """``isinstance`` of a protocol, which asks for attributes of the object itself (Lib/typing.py)."""
        type(protocol).__instancecheck__(protocol, None)  # a TypeError where it may not be asked
        names = sorted(get_protocol_members(protocol))
        found = all([self.attributes.has(value, name) for name in names])
        # What counts as data of an object differs between Pythons.
        if not all(callable(getattr(protocol, name, None)) for name in names) or is_kind(value, protocol) is not found:
            raise Break("isinstance() of a protocol", protocol.__qualname__, "ask for the attributes themselves")
        return found

    def answers_for_class(self, kind: type) -> bool:
        """Whether Python code says what ``__class__`` of the type's objects is, as that of proxies and mocks does."""
        descriptor = self.attributes.on_type(kind, "__class__")
        getter = self.attributes.on_type(kind, "__getattribute__")
        return is_kind(getter, types.FunctionType) or type(descriptor) is not types.GetSetDescriptorType

    def is_of_type(self, value: Any, cls: type) -> bool:
        """``isinstance`` of a value whose ``__class__`` is asked of Python code: by ``object_isinstance``
        (Objects/abstract.c) where its type does not decide, by an abstract class (Modules/_abc.c) always."""
        abstract = self.is_abstract(cls)
        if not abstract and type.__subclasscheck__(cls, type(value)):
            return True
        claimed = self.domain.get_attr(value, "__class__")
        if abstract:
            return self.is_subclass_of(claimed, cls) or self.is_subclass_of(type(value), cls)
        return is_kind(claimed, type) and claimed is not type(value) and type.__subclasscheck__(cls, claimed)

    def has_own_check(self, cls: Any, check: Any, trusting: bool = True) -> bool:
        """Whether a metaclass of the user's says what is an instance; not ``trusting``: any but an abstract class's."""
        known = self.is_abstract(cls) or (trusting and not natives.asks_metaclass(cls))
        return is_kind(check, types.FunctionType) and not known

    def is_abstract(self, cls: Any) -> bool:
        """Whether ABCMeta answers for the class, as it is or below a metaclass that leaves its two checks alone."""
        if not is_kind(cls, abc.ABCMeta):
            return False
        return type(cls) is abc.ABCMeta or all(
            self.attributes.on_type(type(cls), name) is check for name, check in ABSTRACT_CHECKS.items()
        )

    def own_check(self, cls: Any, name: str) -> Any:
        """What a class has to answer ``isinstance`` or ``issubclass`` of it with, None if nothing."""
        if natives.asks_metaclass(cls):
            found = self.attributes.on_type(type(cls), name)
            return None if found is ABSENT else found
        return getattr(type(cls), name, None)

    def is_subclass(self, cls: Any, classes: Any) -> bool:
        if is_kind(cls, type):
            self.attributes.on_type(cls, "__class__")  # guards the bases
        if is_kind(classes, tuple):
            return any(self.is_subclass(cls, c) for c in classes)
        if self.has_own_check(classes, check := self.own_check(classes, "__subclasscheck__")):
            return self.domain.truth(self.call(check, [classes, cls], {}))
        return self.is_subclass_of(cls, classes)

    def is_subclass_of(self, cls: Any, classes: Any) -> bool:
        if is_kind(classes, tuple):
            return any(self.is_subclass_of(cls, c) for c in classes)
        if is_kind(cls, type) and is_kind(classes, type):
            return self.guards.subclass(cls, classes)
        return issubclass(cls, classes)

    def is_iterated_late(self, value: Any) -> bool:
        """Whether it matters when it is asked for its iterator: code of the user's runs then, or it has none."""
        if is_kind(value, TensorProxy):
            return value.fake.dim() == 0  # which has none
        method = self.attributes.on_type(type(value), "__iter__")
        return method is ABSENT or is_kind(method, types.FunctionType)

    def length(self, value: Any) -> Any:
        value = self.objects.seen_through(value)
        if issubclass(type(value), TensorProxy):
            refuse_doubtful(self.tensors.world, "len", (value,))
            if value.fake.dim() == 0:
                raise TypeError("len() of a 0-d tensor")
            return value.fake.shape[0]
        kind = type(value)
        if issubclass(type(value), SymbolicObject):
            return value.length()
        if kind in ATOMS or issubclass(type(value), natives.VIEWS) or kind in (tuple, frozenset):
            return len(value)
        method = self.attributes.on_type(kind, "__len__")
        if (found := self.domain.by_own_method(method, "__len__", value)) is not ABSENT:
            if type(found) is not Number:
                return checked_length(found)
            negative = found.kind is int and self.domain.truth(self.domain.compare("<", found, 0))
            return checked_length(natives.specialised(found)) if negative or found.kind is not int else found
        if method is ABSENT:
            raise TypeError(f"object of type {type_name(kind)!r} has no len()")
        base = with_items(kind)
        if base is None:
            if is_array(value) and (whole := self.array_inputs.input(value)) is not None:
                return whole.fake.shape[0]
            raise Break("len() in C", kind.__name__, "it runs natively")
        if (record := self.objects.of_open_length(value)) is not None:
            return self.domain.tails.length_of(record, self.objects.kept_by(record))
        if (known := self.objects.length_alone(value)) is not None:
            return known
        return base.__len__(self.objects.contents(value))

    def get_attribute(self, obj: Any, name: str, *default: Any) -> Any:
        name = natives.specialised(name)
        if not default:
            return self.attributes.get(obj, name)
        try:
            return self.attributes.get(obj, name)
        except AttributeError:
            return default[0]

    def iterate(self, value: Any, *sentinel: Any) -> Any:
        if sentinel:
            return self.objects.made(iter(self.callback(value), *sentinel))
        if is_array(value):  # the program can see what it is
            raise Break("iteration over a C object", "ndarray", "iterate over it with a for loop, or over a list of it")
        return self.domain.get_iter(value)

    def advance(self, iterator: Any, *default: Any) -> Any:
        if type(iterator) in self.domain.row_types:
            return self.domain.next_item(iterator)
        is_traced = is_kind(iterator, TensorProxy | SymbolicObject) and not hasattr(type_of(iterator), "__next__")
        if type(iterator) in (*natives.NO_ITERATORS, Number, *SYMBOLIC) or is_traced:
            raise TypeError(f"{type_name(type_of(iterator))!r} object is not an iterator")
        kind = type(iterator)
        if not issubclass(kind, SymbolicObject) and self.attributes.on_type(kind, "__next__") is ABSENT:
            raise TypeError(f"{type_name(kind)!r} object is not an iterator")
        try:
            return self.call(self.attributes.get(iterator, "__next__"), [], {})
        except StopIteration:
            if default:
                return default[0]
            raise

    def is_callable(self, value: Any) -> bool:
        kind = type(value)
        if issubclass(kind, SymbolicObject):
            return any("__call__" in base.__dict__ for base in type_of(value).__mro__)
        self.attributes.rely_on(kind, "__call__")
        return kind is TensorMethod or (not issubclass(kind, (TensorProxy, *SYMBOLIC)) and callable(value))

    def handled_exception(self) -> Any:
        """``sys.exception()``: what an except clause of the step's handles, or the caller's own, which must be none."""
        handled = self.domain.machine.handled()
        if handled is not None:
            return handled
        if sys.exception() is not None:
            raise Break("sys.exception()", "the step is called while an exception is handled", "it runs natively")
        self.heap.note("handled exception")
        self.guards.answers("sys.exception()", "no exception is being handled", (sys.exception, None))
        return None

    def exception_details(self) -> Any:
        """``sys.exc_info()`` outside of any except clause: three times None."""
        if self.handled_exception() is not None:
            raise Break("sys.exc_info()", "a traceback names frames that a graph does not have", "it runs natively")
        return None, None, None

    def parse_json(self, text: Any, **options: Any) -> Any:
        """``json.loads`` of a known text runs natively: it scans the text in C."""
        if options or type(text) is not str:
            return self.domain.call_function(cast(types.FunctionType, json.loads), [text], options)
        return self.made_throughout(json.loads(text))

    def made_throughout(self, value: Any) -> Any:
        """A new value of plain containers, with all that it holds."""
        for part in value.values() if type(value) is dict else value if type(value) is list else ():
            self.made_throughout(part)
        return self.objects.made(value)

    def identity(self, value: Any) -> int:
        if is_kind(value, TensorProxy):
            source, found = value.source, value.real
        else:
            source, found = getattr(self.objects.record_of(value), "source", None), value
        self.heap.read("fact", None, "identity", None)
        if source is not None and source.static:
            return id(found)
        raise Break(
            "id()",
            f"the identity of a {type_of(value).__name__} differs from call to call",
            "use the object as a key instead",
        )

    def hash_of(self, value: Any) -> int:
        if natives.is_plain(value, self.known) and not issubclass(type(value), str | bytes):
            return hash(value)
        own = self.attributes.on_type(type(value), "__hash__") if is_kind(value, type) else type(value).__hash__
        if own is object.__hash__ or is_kind(value, TensorProxy):
            self.identity(value)  # a graph break where it is another object in each call
            return object.__hash__(value)
        return hash(self.objects.real_key(own_key(self.domain, value, None)))

    def boolean(self, *value: Any) -> Any:
        if len(value) != 1:
            return bool(*value)  # Python's own answer or error
        if is_kind(value[0], torch.SymBool | torch.SymInt):
            return bool(value[0])
        return self.domain.truth(value[0])

    def add_up(self, values: Any, start: Any = 0) -> Any:
        if type(start) in (str, bytes, bytearray):
            return sum((), start)  # Python's own error
        numbers, total = [start], ABSENT  # at first, while all are numbers
        for value in self.domain.native_iter(values):
            if total is ABSENT and is_added_in_c(number_kind(value)) and is_added_in_c(number_kind(start)):
                numbers.append(value)
                continue
            total = self.sum_of_numbers(numbers) if total is ABSENT else total
            total = self.domain.binary("+", total, value)
        return self.sum_of_numbers(numbers) if total is ABSENT else total

    def sum_of_numbers(self, numbers: list[Any]) -> Any:
        if len(numbers) > 1 and any(issubclass(number_kind(number), FLOATING) for number in numbers):
            # Not one by one: from 3.12 on what each addition loses is added in the end (Python/bltinmodule.c).
            return self.numbers.apply(sum, numbers[1:], numbers[0])
        return functools.reduce(functools.partial(self.domain.binary, "+"), numbers)

    def extreme(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, key: Any = None, **kwargs: Any) -> Any:
            if not args or (kwargs and (len(args) > 1 or kwargs.keys() != {"default"})):
                return function(*args, **kwargs)  # says what is wrong with them
            values, keys = [], []
            for value in self.domain.native_iter(args[0]) if len(args) == 1 else args:
                values.append(value)
                keys.append(value if key is None else self.call(key, [value], {}))
            if not values:
                return function(values, **kwargs)
            if len(values) == 1:  # compared with nothing
                return values[0]
            bounds = self.domain.bounds
            if key is None and any(type(v) in (Number, torch.SymFloat) for v in values):
                if all(type(v) in (*PLAIN_NUMBERS, *NUMPY_NUMBERS, Number) or type(v) in SYMBOLIC for v in values):
                    of_types = bounds.of_types(function, values)
                    return self.numbers.apply(function, *values) if of_types is None else of_types
            if either := [v for v in values if type(v) is Either]:
                if key is None and len(values) == 2:
                    return either[0].with_both(function.__name__, function, run, *values)
                either[0].refuse(f"{function.__name__}()")
            compared = key is None and any(type(v) is TensorProxy for v in values)
            if compared and len(args) > 1 and (bound := bounds.of(function, values)) is not None:
                return bound
            if compared and len(args) > 1 and all(map(is_of_one_number, args)):
                return self.one_by_one(function, args)
            plain = all(natives.is_plain(k, self.known) or is_kind(k, torch.SymInt) for k in keys)
            if compared or not plain and (key is None or all(map(self.compares_in_c, keys))):
                one_by_one = self.substitute(largest if function is max else smallest)
                pairs = [self.objects.made(pair) for pair in zip(keys, values, strict=True)]
                return self.domain.call_function(one_by_one, pairs, {})
            if not plain:  # C calls the key and the keys' own comparison in turns
                raise Break(
                    f"{function.__name__}() of values that are not plain",
                    ", ".join(type_of(k).__name__ for k in keys[:4]),
                    "give it a key that is a number, a string or a tuple of such",
                )
            if any(is_kind(k, torch.SymInt) for k in keys) and key is None:
                if not all(type(k) in (int, torch.SymInt) for k in keys):  # C gives one of them, with its own type
                    return self.one_by_one(function, values)
                return functools.reduce(torch.sym_max if function is max else torch.sym_min, keys)
            chosen = function(range(len(keys)), key=keys.__getitem__)
            return values[chosen]

        return run

    def compares_in_c(self, key: Any) -> bool:
        if type(key) is tuple:
            return all(map(self.compares_in_c, key))
        return natives.is_plain(key, self.known) or type(key) in (Number, TensorProxy, *SYMBOLIC)

    def one_by_one(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """``max(1e-3, rms)`` asks a tensor whether it is the greater, and gives the number or the tensor. When the data
        says otherwise than now, Python calls it once more (``can_ask_again``)."""
        best, sign = values[0], ">" if function is max else "<"
        for value in values[1:]:
            if self.domain.truth(self.domain.compare(sign, value, best)):
                best = value
        return best

    def sort(self, values: Any, *, key: Any = None, reverse: Any = False) -> Any:
        if type(values) is TensorRows and values.numbers:  # a set that tolist() sorted
            return values
        items = self.listed(values)
        keys = leading([self.call(key, [v], {}) for v in items] if key is not None else items)
        if any(map(is_open_key, keys)) and all(map(self.compares_in_c, keys)):
            keys = [Ordered(self.domain, k) for k in keys]  # C asks of each pair which is the less, and nothing else
        else:
            keys = [natives.specialised(k) for k in keys]
            if not all(natives.is_plain(k, self.known) for k in keys):
                kinds = ", ".join(type_of(k).__name__ for k in keys[:4])
                raise Break("sorting values that are not plain", kinds, "sort plain keys")
        order = sorted(range(len(items)), key=keys.__getitem__, reverse=bool(reverse))
        return self.objects.made([items[i] for i in order])

    def pickled(self, value: Any, protocol: Any = None) -> Any:
        """What tells apart the arguments of a cached method."""
        if type(protocol) not in (int, type(None)) or not natives.pickles_alike(value, self.known, set()):
            detail = f"pickle.dumps() of a {type_of(value).__name__}"
            raise Break("call into C", detail, "pickle it outside of the step")
        return pickle.dumps(value, protocol)

    def to_int(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:  # a text and a base: of a number Python's own error
            value = [natives.specialised(one, self.known) for one in args[:1]]
            return int(*value, *map(self.domain.as_index, args[1:]), **kwargs)
        (value,) = args
        kind = type(value)
        if kind is ArrayNumber:
            return value.value
        if kind is Array:
            return self.to_int(value.number())
        if kind is Bound:
            return value.number
        if kind is torch.SymInt or kind is Number and value.kind is int:
            return value
        if kind is torch.SymFloat:
            return torch_sizes.truncated(value)
        if kind is torch.SymBool:
            return int(self.tensors.symbolic_truth(value))
        if kind is Number or kind in NUMPY_NUMBERS:
            return self.numbers.apply(int, value)
        if is_kind(value, TensorProxy):
            one = value.fake.dtype in INTEGERS or (value.fake.dtype.is_floating_point and not value.fake.dim())
            if one and (number := self.tensors.item(value)) is not None:
                return self.to_int(number)
            raise Break("tensor read as a number", f"int() of a tensor {value.describe()}", "keep it in a tensor")
        if not natives.is_plain(value, self.known):
            return self.by_method(value, ("__int__", "__index__"), int)
        return int(value)

    def to_whole(self, function: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and type(args[0]) is torch.SymFloat:
                return function(torch_sizes.rounded(args[0]))
            return self.native(function, list(args), kwargs)

        return run

    def to_float(self, *args: Any) -> Any:
        if len(args) != 1:
            return float(*args)  # Python's own answer or error
        (value,) = args
        if type(value) is Array:
            return self.to_float(value.number())
        if type(value) is Number:
            return value if value.kind is float else self.numbers.apply(float, value)
        if is_kind(value, TensorProxy):
            if (number := self.tensors.item(value)) is not None:
                return self.to_float(number)
            raise Break("tensor read as a number", f"float() of a tensor {value.describe()}", "keep it in a tensor")
        if type(value) in (torch.SymInt, torch.SymFloat):
            return torch.sym_float(value)
        if not natives.is_plain(value, self.known):
            return self.by_method(value, ("__float__", "__index__"), float)
        return float(value)

    def number_operand(self, function: Any, value: Any) -> Any:
        """What a function in C that computes looks into: of a tensor, the number that its ``__float__`` gives."""
        asked = type(value) is TensorProxy and function in natives.OF_FLOATS
        return self.to_float(value) if asked else self.domain.plain_contents(value)

    def by_method(self, value: Any, names: tuple[str, ...], kind: Any) -> Any:
        """``int(value)`` or ``float(value)`` by its class's first method (Objects/abstract.c PyNumber_Float)."""
        for name in names:
            method = self.attributes.on_type(type(value), name)
            if is_kind(method, types.FunctionType):
                found = self.call(method, [value], {})
                wanted = int if name == "__index__" else kind
                if not issubclass(type_of(found), wanted):
                    owner = f"{type_name(type(value))}." if name == "__float__" else ""
                    what = f"{owner}{name} returned non-{wanted.__name__}"
                    raise TypeError(f"{what} (type {type_name(type_of(found))})")
                if type_of(found) is not wanted:
                    raise Break(f"{kind.__name__}() in C", f"{name} returned a {type_of(found).__name__}", "return one")
                return found if wanted is kind else self.to_float(found)
        if (member := plain_member(value)) is not value:
            return kind(member)
        raise Break(f"{kind.__name__}() in C", type(value).__name__, "convert it outside of the step")

    def format(self, value: Any, spec: Any = "") -> Any:
        return self.domain.format_value(value, "", natives.specialised(spec))

    def to_ascii(self, value: Any) -> Any:
        text = natives.specialised(self.domain.repr_of(value), self.known)
        return text.encode("ascii", "backslashreplace").decode()

    # object's own methods, reached through super() or by name
    def object_setattr(self, owner: Any, name: str, value: Any) -> None:
        refuse_class(owner, "__setattr__")
        self.attributes.set_generic(owner, name, value)

    def object_getattribute(self, owner: Any, name: str) -> Any:
        if issubclass(type(owner), types.ModuleType | type):
            return self.attributes.get(owner, name)
        return self.attributes.generic(owner, name)

    def object_delattr(self, owner: Any, name: str) -> None:
        refuse_class(owner, "__delattr__")
        self.attributes.delete_generic(owner, name)

    def object_init(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        base = derived_from(type(owner), CONTAINERS)
        if base is not None:
            self.init_container(owner, base, list(args), kwargs)
        elif issubclass(type(owner), BaseException):
            made_by_c(type(owner)).__init__(owner, *map(self.domain.kept_in_an_exception, args), **kwargs)
        elif issubclass(type(owner), types.SimpleNamespace):  # Objects/namespaceobject.c namespace_init
            for values in args:
                kwargs = dict(self.mapping_or_items(values, dict)) | kwargs
            types.SimpleNamespace(*[{}] * len(args), **kwargs)  # (3.13 takes a mapping; Python's own error)
            for name, value in kwargs.items():
                self.attributes.set_generic(owner, name, value)
        elif args or kwargs:  # Objects/typeobject.c object_init
            kind: Any = type_of(owner)
            if kind.__init__ is not object.__init__:
                raise TypeError("object.__init__() takes exactly one argument (the instance to initialize)")
            if kind.__new__ is object.__new__:
                raise TypeError(f"{type_name(kind)}.__init__() takes exactly one argument (the instance to initialize)")

    def object_reduce(self, owner: Any, *_: Any) -> Any:
        raise Break("pickling in the step", type_of(owner).__name__, "copy or pickle outside of the step")

    def object_eq(self, owner: Any, other: Any) -> Any:
        return True if self.domain.is_same(owner, other) else NotImplemented

    def object_ne(self, owner: Any, other: Any) -> Any:
        """The opposite of what the class's own ``__eq__`` says (Objects/typeobject.c object_richcompare)."""
        method = self.attributes.on_type(type_of(owner), "__eq__")
        equal = self.call(self.attributes.bind(method, owner, type_of(owner)), [other], {})
        return equal if equal is NotImplemented else not self.domain.truth(equal)

    def object_init_subclass(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        """``object.__init_subclass__`` does nothing but raise where it gets something."""
        object.__dict__["__init_subclass__"].__get__(None, owner)(*args, **kwargs)


def is_open_key(key: Any) -> bool:
    """Whether C sorts by a number that varies, or by a tuple with one."""
    return any(map(is_open_key, key)) if type(key) is tuple else type(key) in (Number, *SYMBOLIC)


def leading(keys: Sequence[Any]) -> Sequence[Any]:
    """Of tuples, what C looks at to tell any two apart: ``sorted(d.items())`` asks the values nothing. The keys
    themselves where that is not all plain."""
    if all(type(key) is tuple for key in keys):
        for n in range(1, min(map(len, keys), default=0) + 1):
            shorter = [key[:n] for key in keys]
            if any(type(key[-1]) not in ATOMS or is_open_key(key[-1]) for key in shorter):
                break
            if len(set(shorter)) == len(keys):
                return shorter
    return keys


class Ordered:
    """A size, or a tuple with one, that C sorts: which of two is the less is a fact about them."""

    def __init__(self, domain: Any, size: Any):
        self.domain, self.size = domain, size

    def __lt__(self, other: Ordered) -> bool:
        return bool(self.domain.truth(self.domain.compare("<", self.size, other.size)))


def checked_length(result: Any) -> Any:
    """What ``len()`` makes of a ``__len__``'s answer: its own errors for what is no length."""
    if is_kind(result, SYMBOLIC):
        return result
    if not is_kind(result, int):
        raise TypeError(f"'{type_name(type_of(result))}' object cannot be interpreted as an integer")
    if result < 0:
        raise ValueError("__len__() should return >= 0")
    return int(result)


def refuse_class(owner: Any, name: str) -> None:
    """``object.__setattr__`` does not take classes (Objects/typeobject.c hackcheck)."""
    if issubclass(type(owner), type):
        raise TypeError(f"can't apply this {name} to {type_name(type(owner))} object")
