"""Methods of builtin types: of containers (or their shadows), of plain values, of classes, of context variables."""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import random
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import MEASURING, STOP, is_kind
from moebius.interpreter.forms import form_of

from ..bytecode import c_callables
from ..guards.sources import Static
from ..heap.records import DICTS, FILLED_BY_C, LISTS, SETS, Record, derived_from, raw_items, with_items
from ..hook import ABSENT, copy_set
from ..tensors.array_inputs import is_array, may_be_array
from ..tensors.index_lists import index_list
from ..torch_facts import torch_private
from ..values.numbers import is_open, numpy_numbers_in
from ..values.values import ATOMS, SYMBOLIC, Break, RuntimeNumber, TensorProxy, type_of
from ..values.views import View
from . import arity, natives
from .container_methods import (
    ADDING,
    CALLED_TO_CHANGE,
    CALLED_TO_MAKE,
    CALLED_TO_READ,
    CALLING,
    CHANGING,
    CONTAINER_METHODS,
    ITERABLE_ARGUMENT,
    KEYED,
    MAKING,
)  # fmt: skip
from .enums import plain_member
from .formats import Fields
from .originals import DRAW
from .own_hashes import new_key, own_key
from .parts import CallParts, is_alien
from .questions import Answer
from .substitutes import cut_at
from .texts import Text, texts

# where methods of sequences take an index or a count
INDEXES = {name: slice(0, 1) for name in ("insert", "pop", "rotate", "__mul__", "__rmul__", "__imul__")}
INDEXES["index"] = slice(1, 3)
BY_KEY = frozenset(("__setitem__", "__delitem__", "pop", "setdefault", "update"))  # of dicts: ``by_keys_alone``
NOT_JOINED = "can only join an iterable"
OBJECT_METHODS = {
    "__setattr__": "object_setattr",
    "__getattribute__": "object_getattribute",
    "__delattr__": "object_delattr",
    "__init__": "object_init",
    "__reduce__": "object_reduce",
    "__reduce_ex__": "object_reduce",
    "__eq__": "object_eq",
    "__ne__": "object_ne",
    "__hash__": "identity",
    "__init_subclass__": "object_init_subclass",
}
# how many arguments there are (of any object's), and what the domain does for a tensor
TENSOR_SPECIALS: dict[str, tuple[int, Callable[..., Any]]] = {
    "__setattr__": (2, lambda domain, *args: domain.attributes.set(*args)),
    "__getattribute__": (1, lambda domain, *args: domain.attributes.get(*args)),
    "__delattr__": (1, lambda domain, *args: domain.attributes.delete(*args)),
    "__str__": (0, lambda domain, proxy: domain.text_of(proxy)),
    "__repr__": (0, lambda domain, proxy: domain.repr_of(proxy)),
    "__format__": (1, lambda domain, proxy, spec: domain.format_value(proxy, "", spec)),
    "__hash__": (0, lambda domain, proxy: domain.calls.hash_of(proxy)),
    "__getitem__": (1, lambda domain, *args: domain.tensors.get_item(*args)),
    "__setitem__": (2, lambda domain, *args: domain.tensors.set_item(*args)),
}
TAKEN = {"__eq__": 1, "__ne__": 1, "__getattribute__": 1, "__setattr__": 2, "__delattr__": 1, "__hash__": 0}
ATTRIBUTES = ("__getattribute__", "__setattr__", "__delattr__")
OTHERWISE_IN_OBJECT = ("__str__", "__repr__", "__format__", "__dir__", "__sizeof__", "__reduce__", "__reduce_ex__")

DRAWS = frozenset({"random", "getrandbits", "seed", "getstate", "setstate"})  # the rest of ``random.Random`` is Python


def cuts_at_places(
    proxy: TensorProxy, tensor_indices_or_sections: Any = None, dim: Any = 0, *others: Any, **names: Any
) -> bool:
    """Whether a call of ``tensor_split`` is at a vector of places."""
    places, rank = tensor_indices_or_sections, proxy.fake.dim()
    vector = type(places) is TensorProxy and places.fake.dim() == 1 and places.fake.dtype is torch.int64
    return vector and places.fake.is_cpu and type(dim) is int and -rank <= dim < rank and not (others or names)


class ContextToken:
    """What ``ContextVar.set`` gives while tracing."""

    def __init__(self, variable: contextvars.ContextVar, before: Any):
        self.variable, self.before = variable, before
        self.used = False  # whether ``reset`` has had it


class Methods(CallParts):
    """Calls of methods that are written in C."""

    def tensor_method(self, proxy: TensorProxy, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """``proxy.name(*args, **kwargs)``; what a list in an argument holds is read, so it is guarded."""
        if name == "tolist" and (rows := self.domain.loops.numbers(proxy)) is not None:
            return rows
        if name == "tolist" and not args and self.tensors.whole_step and (numbers := index_list(proxy)) is not None:
            return self.objects.made(numbers)
        if name == "numpy" and (array := self.domain.arrays.of_tensor(proxy, args, kwargs)) is not None:
            return array
        if name == "new_tensor" and args and may_be_array(args[0]):
            if (made := self.array_inputs.made_from(torch.Tensor.new_tensor, proxy, args, kwargs)) is not None:
                return made
        if name == "new_tensor" and args and numpy_numbers_in(args[0]):
            raise Break("number of numpy's", "a tensor is made of it", "convert it to a plain number: float(x)")
        if name in TENSOR_SPECIALS:
            return self.tensor_special(proxy, name, args, kwargs)
        method = getattr(torch.Tensor, name, None)
        if (answer := self.overridden(method, (proxy, *args), kwargs)) is not ABSENT:
            return answer
        if name == "tensor_split" and cuts_at_places(proxy, *args, **kwargs):
            return self.call(self.substitute(cut_at), [proxy, *args], kwargs)
        args, kwargs = self.operands(args, kwargs)
        return self.tensors.method(proxy, name, tuple(args), kwargs)

    def tensor_special(self, proxy: TensorProxy, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """``tensor.__str__()``, ``object.__setattr__(tensor, …)``: what ``str`` and ``setattr`` do."""
        count, form = TENSOR_SPECIALS[name]
        if len(args) != count or kwargs:
            raise Break(f"Tensor.{name}", f"with {len(args)} arguments and {len(kwargs)} keywords", "it runs natively")
        return form(self.domain, proxy, *args)

    def unbound(self, descriptor: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``str.upper(x)``, ``object.__setattr__(obj, ...)``: a method descriptor with its object as first argument."""
        if not args:
            raise TypeError(f"unbound method {descriptor.__qualname__}() needs an argument")
        owner, rest, name = args[0], args[1:], descriptor.__name__
        if type(owner) is TensorProxy:
            if name in OTHERWISE_IN_OBJECT and descriptor.__objclass__ is object:
                raise Break("method of object", f"object.{name} of a tensor", "it runs natively")
            return self.tensor_method(owner, name, rest, kwargs)
        if issubclass(type(owner), RuntimeNumber | Text) or type(owner) in SYMBOLIC:
            found: Any = getattr(type_of(owner), name, ABSENT)
            if found is not descriptor:
                detail = f"{descriptor.__qualname__} of a {type_of(owner).__name__}"
                raise Break("method of another class", detail, "it runs natively; call it by its name on the object")
            return self.call(self.domain.get_attr(owner, name), rest, kwargs)
        bound = descriptor if is_alien(owner) else c_callables.bound(descriptor, owner)
        if type(owner) in ATOMS and name not in OBJECT_METHODS:  # errors name the class that the descriptor is of
            return self.atom_method(owner, name, functools.partial(descriptor, owner), rest, kwargs)
        return self.method_of(owner, name, bound, rest, kwargs)

    def method_of(self, owner: Any, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A builtin method with the object that it belongs to."""
        if (shown := self.objects.seen_through(owner)) is not owner:
            return self.call(self.domain.get_attr(shown, name), args, kwargs)
        kind = type(owner)
        if issubclass(kind, contextvars.ContextVar):
            return self.context_variable(owner, name, args)
        if name in OBJECT_METHODS and is_object_method(bound, kind):
            if name in TENSOR_SPECIALS and len(args) != TENSOR_SPECIALS[name][0]:
                return bound(*args)  # raises the TypeError that says so
            unnamed = name in ATTRIBUTES and args and not is_kind(args[0], str | Text)
            if unnamed or name in TAKEN and (len(args) != TAKEN[name] or kwargs):
                return getattr(object(), name)(*args, **kwargs)  # the same
            return getattr(self, OBJECT_METHODS[name])(owner, *args, **kwargs)
        if issubclass(kind, types.GeneratorType) and self.objects.is_new(owner):
            form = form_of(bound)
            return bound(*args, **kwargs) if form is None else form(self.domain, args, kwargs)
        if issubclass(kind, type):
            return self.class_method(owner, name, bound, args, kwargs)
        if kind in ATOMS or plain_member(owner) is not owner:
            return self.atom_method(owner, name, bound, args, kwargs)
        base = with_items(kind)
        if base is not None:
            return self.container_method(owner, base, name, args, kwargs)
        if kind in natives.VIEWS and name in ("__len__", "__iter__", "__contains__", "isdisjoint"):
            return bound(*args)
        if issubclass(kind, natives.ITERATORS) and name in ("__iter__", "__next__") and not (args or kwargs):
            return owner if name == "__iter__" else self.next_of(owner)
        if issubclass(kind, types.MethodType | types.FunctionType) and name == "__get__":
            return self.attributes.bind(owner, args[0], type(args[0])) if args[0] is not None else owner
        if issubclass(kind, BaseException) and name in ("with_traceback", "add_note") and self.objects.is_new(owner):
            return bound(*args, **kwargs)
        if bound == DRAW:  # as ``random.uniform`` finds it
            return self.call(bound, args, kwargs)
        if kind is random.Random and self.objects.is_new(owner) and name in DRAWS and not kwargs:
            if all(natives.is_plain(a, self.known) for a in args) and (name != "seed" or args not in ([], [None])):
                self.objects.touch(owner)
                return self.objects.made(bound(*args))
        if kind is re.Pattern and all(natives.is_plain(a, self.known) for a in args):
            if (record := self.objects.record_of(owner)) is not None:
                self.objects.pin(record, "is this pattern")
            return self.objects.made(bound(*args, **kwargs))
        if kind is re.Match and all(type(a) in ATOMS for a in (*args, *kwargs.values())):
            return self.of_match(owner, name, bound, args, kwargs)
        if is_array(owner) and (made := self.array_calls.method(owner, name, args, kwargs)) is not ABSENT:
            return made
        if (done := self.streams.call(owner, name, args, kwargs)) is not ABSENT:
            return done
        raise Break(
            "method in C",
            f"{kind.__module__}.{kind.__qualname__}.{name} is not known to be free of effects",
            "it runs natively; call it before or after the step for one graph",
        )

    def of_match(self, match: re.Match, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``match.group(1)``, ``match[1]``: of one that was there before, what it answers is a fact."""
        answer = bound(*args, **kwargs)
        if (record := self.objects.record_of(match)) is not None:
            asked = Answer(operator.methodcaller(name, *args, **kwargs), answer)
            self.guards.holds(record.source.name, f"gives {answer!r}"[:80], asked, record.source)
        return self.objects.made(answer)

    def next_of(self, iterator: Any) -> Any:
        """``next(iterator)`` of one that tracing made; advancing another is a graph break."""
        item = self.domain.next_item(iterator)
        if item is STOP:
            raise StopIteration
        return item

    def atom_method(self, owner: Any, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        if is_kind(owner, torch.device) and name in ("__enter__", "__exit__"):  # as set_default_device does
            if torch_private.is_default_device(owner):  # (that no other is set, is guarded)
                return owner if name == "__enter__" else None
            raise Break("default device", f"with torch.device({str(owner)!r})", "pass device= to what makes tensors")
        if name == "join" and args and is_kind(owner, str):
            args = [self.fast(args[0], NOT_JOINED)]
            if self.texts.is_open(*args[0]) and all(is_kind(v, str | Text) for v in args[0]):
                between = [v for part in args[0] for v in (owner, part)][1:]
                return self.texts.make(texts.joined, *between)
        if name == "format" and is_kind(owner, str):
            return Fields(self.domain, args, kwargs.__getitem__).filled(owner)
        if name == "format_map" and is_kind(owner, str) and len(args) == 1 and not kwargs:
            return Fields(self.domain, None, lambda key: self.domain.get_item(args[0], key)).filled(owner)
        if is_kind(owner, torch.Size) and is_open([*owner, *args]):
            if name == "numel" and not (args or kwargs):
                return functools.reduce(functools.partial(self.domain.binary, "*"), owner, 1)
            if name in ("index", "count"):
                return self.compared_method(owner, name, args, kwargs)
        values = [natives.specialised(self.domain.plain_contents(a), self.known) for a in args]
        if name == "join" and args:
            values = [args[0] if is_kind(owner, str) else self.fast(args[0], NOT_JOINED)]
        if not all(natives.is_plain(v, self.known) for v in (*values, *kwargs.values())):
            raise Break(
                "method of a plain value",
                f"{type(owner).__name__}.{name} with arguments that are not plain",
                "pass plain values",
            )
        return self.objects.made(bound(*values, **kwargs))

    def container_method(self, owner: Any, base: type, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of list, dict, set, tuple, deque or of a class derived from one, on the object or its shadow."""
        table = CONTAINER_METHODS[base]
        args, kwargs = arity.positional(base, name, args, kwargs)
        arity.check(base, name, args, kwargs)
        if name in ("append", "extend"):
            self.domain.lists.appends(owner)
        if name not in table:
            if name == "__init__":
                return self.init_container(owner, base, args, kwargs)
            if name in ("__eq__", "__ne__"):
                if not issubclass(type_of(args[0]), (set, frozenset) if base in (set, frozenset) else base):
                    return NotImplemented
                plain = [self.without_its_class(value, base) for value in (owner, args[0])]
                return self.domain.compare("==" if name == "__eq__" else "!=", *plain)
            raise Break("method in C", f"{base.__name__}.{name}", "it runs natively")
        if name in MAKING or (base is collections.OrderedDict and name in CALLING):
            self.refuse_own_methods(type(owner), name)
        by_key = base in DICTS and name in BY_KEY and self.objects.record_of(owner) is not None  # (asks by itself)
        if name in CHANGING and not by_key and not self.leaves_as_it_is(owner, base, name, args):
            bounded = base is collections.deque  # (one that is full lets go of an item)
            side = self.objects.side_of(owner) if name in ("append", "extend") else None
            self.objects.touch(owner, lets_go=bounded or name not in ADDING, place=side)
        if base in DICTS and name == "__getitem__":
            return self.domain.dict_item(owner, type(owner), args[0])
        if base is collections.OrderedDict and name == "update" and self.is_own(type(owner), "__setitem__"):
            return self.set_items(owner, self.mapping_or_items(args[0], base) if args else {}, kwargs)
        record = self.objects.record_of(owner)
        if record is not None and base in DICTS:
            if name in ("keys", "values", "items") and self.objects.is_growing(record) and not (args or kwargs):
                shown = getattr(base, name)  # of dict's own
                return self.objects.made(View(type(shown(base())), lambda emitter: emitter.call(shown, owner)))
            if (done := self.by_keys_alone(record, name, args, kwargs, base)) is not ABSENT:
                return done
        if record is not None and name in ("append", "extend") and base in LISTS:
            items = args if name == "append" else self.listed(args[0])  # which may read the list: it has a shadow then
            if self.objects.adds(record, items, side):
                return None
            name, args = "extend", [items]
        if base in (*LISTS, tuple) and (at := INDEXES.get(name)) is not None:
            args = [*args[: at.start], *map(self.domain.as_count, args[at]), *args[at.stop :]]
        target = self.objects.contents(owner)
        if base in (set, frozenset) and name in ITERABLE_ARGUMENT:
            if name == "isdisjoint":  # (asks for exactly a set)
                args = [a if type(a) in (set, frozenset) else self.drain(a) for a in args]
            args = [self.keys_of(a) for a in args]
        if name in ("__add__", "__or__", "__and__", "__sub__"):
            args = [self.domain.operand(a) for a in args]
        if base in DICTS or base in SETS:
            if name in KEYED and args:
                args = [new_key(self.domain, args[0], owner), *args[1:]]
        elif not table[name]:
            return self.compared_method(target, name, args, kwargs)
        if name in ITERABLE_ARGUMENT and args and base not in (set, frozenset):
            args = [self.mapping_or_items(args[0], base), *args[1:]]
        if name == "__getitem__" and (base in LISTS or base is tuple):
            ask = self.domain.get_item if type(owner) is base else self.domain.sequence_item
            return ask(target, args[0])
        method = getattr(base, name)
        if base is set and name == "pop":
            self.objects.settle_order(target)
        if record is not None and base in SETS and name in CHANGING:
            return self.change_set(record, target, method, args)
        return self.objects.made(method(target, *args, **kwargs))

    def without_its_class(self, value: Any, base: Any) -> Any:
        """A container of base, for C code that looks at the items and asks no method of a class derived from it."""
        held = self.objects.contents(value)
        if type(held) in CONTAINER_METHODS:
            return value
        return self.objects.made(base(dict.items(held)) if base in DICTS else base(raw_items(held)))

    def leaves_as_it_is(self, owner: Any, base: type, name: str, args: list) -> bool:
        """``discard`` of what is not there (``Module.register_buffer`` does it), ``add`` of what is."""
        if base is not set or name not in ("add", "discard") or len(args) != 1:
            return False
        if type(args[0]) not in ATOMS or not natives.is_plain(args[0], self.known):
            return False
        return (args[0] in self.objects.contents(owner)) == (name == "add")

    def change_set(self, record: Record, target: set, method: Any, args: list) -> None:
        """Of a set that existed before: kept as what was done, since the order of its items depends on that."""
        name, size = method.__name__, len(target)
        if name == "pop":
            raise Break("set.pop", "which item it takes depends on earlier calls", "it runs natively")
        operations: list[tuple[str, Any]] = [(name, copy_set(a) if type(a) is set else a) for a in args]
        method(target, *args)
        if len(target) != size or name not in ("add", "discard"):
            record.operations += (*operations,) or ((name, ABSENT),)

    def keys_of(self, value: Any) -> Any:
        """What ``set.update`` is given: a set itself where it can be (it makes room for that at once), else a list."""
        items = self.objects.contents(value) if type(value) is set else value
        if type(items) in (set, frozenset) and all(self.objects.made_key(v) is v for v in items):
            return items
        return [self.objects.made_key(v) for v in self.members(value)]

    def members(self, value: Any) -> Any:
        """What C code adds to a set: of a set the items, whatever its class says (PyAnySet_Check)."""
        if type(value) is not set and issubclass(type(value), (set, frozenset)):
            return raw_items(self.objects.contents(value))
        return self.domain.native_iter(value)

    def by_keys_alone(self, record: Any, name: str, args: list, kwargs: dict[str, Any], base: type) -> Any:
        """Dict methods that concern a few keys need not read the whole dict. ABSENT: not such a method."""
        if args and name != "update":
            args = [own_key(self.domain, args[0], record.obj), *args[1:]]
        if name == "get":
            found = self.objects.dict_get(record, args[0])
            return (args[1] if len(args) > 1 else None) if found is ABSENT else found
        if name == "__contains__":
            return self.objects.dict_get(record, args[0]) is not ABSENT
        if name == "__setitem__":
            self.objects.dict_set(record, *args)
            return None
        if name == "pop" or name == "__delitem__":
            found = self.objects.dict_get(record, args[0])
            if found is ABSENT:
                if name == "pop" and len(args) > 1:
                    return args[1]
                raise KeyError(args[0])
            self.objects.dict_delete(record, args[0])
            return found if name == "pop" else None
        if name == "setdefault":
            found = self.objects.dict_get(record, args[0])
            if found is ABSENT:
                found = args[1] if len(args) > 1 else None
                self.objects.dict_set(record, args[0], found)
            return found
        if name == "update":
            for entries in (*[self.mapping_or_items(given, base) for given in args], kwargs):
                for key, value in dict.items(entries) if is_kind(entries, dict) else entries:
                    self.objects.dict_set(record, own_key(self.domain, key, record.obj), value)
            return None
        return ABSENT

    def compared_method(self, target: Any, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        if name == "sort":
            target[:] = self.sort(target, **kwargs)
            return None
        if kwargs or not 1 <= len(args) <= (3 if name == "index" else 1):
            raise Break("method in C", f"{type(target).__name__}.{name} of {len(args)} arguments", "it runs natively")
        bounds = [natives.specialised(a) for a in args[1:]]
        if any(not hasattr(type(bound), "__index__") for bound in bounds):
            raise TypeError("slice indices must be integers or have an __index__ method")
        items = raw_items(target)
        start, stop, _ = slice(*bounds, *[None] * (2 - len(bounds))).indices(len(items))
        count = 0
        for i, item in enumerate(items):
            if not start <= i < stop:
                continue
            if self.domain.is_or_equals(item, args[0]):
                if name == "index":
                    return i
                if name == "remove":
                    del target[i]
                    return None
                count += 1
        if name == "count":
            return count
        if not natives.is_plain(args[0], self.known):
            raise Break("method in C", f"{type(target).__name__}.{name} of what is not there", "it runs natively")
        return getattr(type(target)(), name)(args[0])  # raises, in its own words

    def mapping_or_items(self, value: Any, base: type) -> Any:
        """The argument of ``update``/``extend``: a native mapping or iterator."""
        if base in DICTS:
            if any(b in DICTS for b in type(value).__mro__) and not self.is_read_by_methods(type(value), base):
                return self.objects.contents(value)
            if self.attributes.has(value, "keys"):
                return self.by_keys(value, self.attributes.get(value, "keys"))
            return [self.entry(i, pair) for i, pair in enumerate(self.drain(value))]
        return self.listed(value) if base is list else self.domain.native_iter(value)

    def is_read_by_methods(self, kind: type, base: type) -> bool:
        """Whether C code that adds to a dict, base, what a dict of this class has calls methods of the user's."""
        if kind in DICTS or (base is not collections.OrderedDict and self.is_gone_through_as_a_dict(kind)):
            return False
        return any(self.is_own(kind, name) for name in CALLED_TO_READ)

    def set_items(self, owner: Any, *given: Any) -> None:
        """What OrderedDict's ``update`` does where the class has its own ``__setitem__`` (mutablemapping_update)."""
        for entries in given:
            for key, value in entries.items() if is_kind(entries, dict) else entries:
                self.domain.set_item(owner, key, value)

    def refuse_own_methods(self, kind: type, name: str) -> None:
        """A copy of a container, made by C code, where that calls methods of the user's."""
        base = derived_from(kind, CALLED_TO_MAKE) or kind
        if kind is base:
            return
        asked = CALLED_TO_MAKE[base] if name not in CALLING else CALLED_TO_CHANGE
        if base in DICTS and name not in CALLING and not self.is_gone_through_as_a_dict(kind):
            asked += CALLED_TO_READ
        if own := next((name for name in asked if self.is_own(kind, name)), None):
            raise Break("method in C", f"{base.__name__}.{name} calls {kind.__name__}.{own}", "copy it item by item")

    def is_gone_through_as_a_dict(self, kind: type) -> bool:
        return self.attributes.on_type(kind, "__iter__") is dict.__iter__

    def is_own(self, kind: type, name: str) -> bool:
        return is_kind(self.attributes.on_type(kind, name), types.FunctionType)

    def by_keys(self, value: Any, keys: Any) -> dict[Any, Any]:
        """A dict of what a mapping has; `keys` is its method."""
        return {self.objects.made_key(k): self.domain.get_item(value, k) for k in self.drain(self.call(keys, [], {}))}

    def entry(self, at: int, pair: Any) -> tuple[Any, Any]:
        """The key and the value that the item `at` of an iterable says (Objects/dictobject.c PyDict_MergeFromSeq2)."""
        found = self.fast(pair, f"cannot convert dictionary update sequence element #{at} to a sequence")
        if len(found) != 2:
            raise ValueError(f"dictionary update sequence element #{at} has length {len(found)}; 2 is required")
        return self.objects.made_key(found[0]), found[1]

    def drain(self, value: Any) -> list:
        """All items of an iterable."""
        return list(self.domain.native_iter(value))

    def fast(self, value: Any, refusal: str = "") -> list:
        """Objects/abstract.c PySequence_Fast: a list of what iterating gives, whose iterator is asked for its own.
        refusal: what the error says where nothing can be gone through."""
        if is_kind(value, list | tuple):
            return self.listed(value)
        try:
            iterator = self.domain.get_iter(value)
        except TypeError:
            if not refusal:
                raise
            raise TypeError(refusal) from None
        return self.listed(iterator)

    def listed(self, value: Any, kind: type = list) -> list:
        """What `kind(value)` holds: first the iterator is asked for, then maybe for how many items there are."""
        iterator = self.domain.native_iter(value)
        if kind in MEASURING:
            self.domain.length_hint(value)
        return list(iterator)

    def class_method(self, cls: type, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        if name == "__new__":
            if not args:
                raise TypeError("__new__(): not enough arguments")
            return self.allocate(args[0], bound, args[1:], kwargs)
        if name == "fromkeys" and cls in DICTS:
            keys = [[self.objects.made_key(key) for key in self.drain(found)] for found in args[:1]]
            return self.objects.made(cls.fromkeys(*keys, *args[1:], **kwargs))
        if name == "__subclasses__":
            ask = functools.partial(subclasses, weakref.ref(cls))
            self.heap.read("answer", ask, None, found := ask())
            guards, check = self.objects.guards, functools.partial(is_still, ask, found)
            guards.holds(f"{cls.__qualname__}.__subclasses__()", "are the same", check)
        if name in ("__subclasses__", "mro", "__prepare__"):
            self.attributes.on_type(cls, "__class__")  # guards the bases
            return self.objects.made(bound(*args, **kwargs))
        if name == "from_iterable":
            return self.shallow(bound, args, kwargs)
        if name == "__call__":
            return self.construct(cls, args, kwargs, asks_metaclass=False)
        if name in ("maketrans", "fromhex", "from_bytes"):
            return bound(*args, **kwargs)
        if name in ("__instancecheck__", "__subclasscheck__"):
            if name == "__subclasscheck__":
                return type.__subclasscheck__(cls, args[0])
            return self.is_instance(args[0], cls, asks_metaclass=False)
        raise Break("class method in C", f"{cls.__qualname__}.{name}", "it runs natively")

    def context_variable(self, variable: contextvars.ContextVar, name: str, args: list) -> Any:
        if name == "get":
            value = self.objects.context_get(variable)
            if value is not ABSENT:
                return value
            if args:
                return args[0]
            try:
                default = contextvars.Context().run(variable.get)
            except LookupError:
                raise LookupError(variable) from None
            return self.objects.enter(default, Static(f"ContextVar({variable.name!r}) default", default))
        if name == "set":
            return self.objects.made(ContextToken(variable, self.objects.context_set(variable, args[0])))
        if name == "reset" and is_kind(args[0], ContextToken) and args[0].variable is variable and not args[0].used:
            args[0].used = True
            self.objects.context_set(variable, args[0].before)
            return None
        raise Break("context variable", f"ContextVar.{name}", "set context variables outside of the step")


def subclasses(cls: weakref.ref[type]) -> tuple[weakref.ref[type], ...] | None:
    kind = cls()
    return None if kind is None else tuple(map(weakref.ref, kind.__subclasses__()))


def is_still(ask: Callable[[], Any], answer: Any) -> bool:
    """A guard: a question has this answer."""
    return ask() == answer


def is_object_method(bound: Any, kind: type) -> bool:
    """Whether a slot wrapper is the one of ``object`` (or of what C fills, for ``__init__``)."""
    owner = getattr(bound, "__objclass__", None) or getattr(getattr(kind, bound.__name__, None), "__objclass__", None)
    qualname = getattr(bound, "__qualname__", "")
    if owner is object or qualname.startswith("object.") or bound.__name__ == "__init_subclass__":
        return True
    return bound.__name__ == "__init__" and owner is not None and issubclass(owner, FILLED_BY_C)
