"""Items, iteration and displays of traced values."""

from __future__ import annotations

import collections
import inspect
import itertools
import operator
import re
import types
from collections.abc import Iterator
from typing import Any, cast

import torch

from moebius.interpreter import NULL, STOP, Frame, is_kind
from moebius.interpreter.domain.core import lookup, type_name

from ..guards.program import look_up
from ..heap.places import item_of
from ..heap.records import CONTAINERS, DICTS, LISTS, SETS, UNREAD, derived_from, with_items
from ..heap.walks import parts_of
from ..hook import ABSENT
from ..regions.conditional_lists import ConditionalList
from ..regions.loop_regions import ROWS
from ..tensors.array_inputs import is_array
from ..tensors.arrays import without_arrays
from ..tensors.bounds import Bound
from ..tensors.counts import INTEGERS
from ..tensors.folding import constant_number
from ..tensors.index_lists import IndexList, as_indices, is_varying_list
from ..values.expert_numbers import number_of
from ..values.numbers import Number
from ..values.rows import TensorRows
from ..values.values import ATOMS, Break, SymbolicObject, TensorProxy, type_of
from ..values.views import View
from . import natives
from .own_hashes import new_key, own_key
from .specials import MISSING_IS_SET, is_replaced
from .substitutes import forwards
from .texts import Text
from .written_values import WrittenValues

OPEN_KEYS = (Number, torch.SymInt)
LARGE_TABLE = 1024  # items that a graph's code is to hold at most


class Pulled:
    """An iterator whose every item the trace computes."""

    def __init__(self, domain: Containers, iterator: Any):
        self.domain, self.iterator = domain, iterator

    def __iter__(self) -> Pulled:
        return self

    def __next__(self) -> Any:
        item = self.domain.next_item(self.iterator)
        if item is STOP:
            raise StopIteration
        return item


class Containers(WrittenValues):
    """Reading, writing, walking and building containers."""

    def get_attr(self, obj: Any, name: str) -> Any:
        return self.attributes.get(obj, name)

    def load_method(self, obj: Any, name: str) -> tuple[Any, Any]:
        method = self.attributes.get(obj, name)
        if type(method) is types.MethodType and self.objects.is_new(method):
            return method.__func__, method.__self__
        inherited = type(obj) in ATOMS and self.is_inherited(method, obj, name)
        return (lookup(type(obj), name), obj) if inherited else (method, NULL)

    def load_super_attr(self, frame: Frame, callee: Any, cls: Any, obj: Any, name: str, two_arguments: bool) -> Any:
        if callee is not super:
            return self.get_attr(self.call(callee, [cls, obj] if two_arguments else [], {}), name)
        return self.get_attr(self.calls.make_super(cls, obj), name)

    def set_attr(self, obj: Any, name: str, value: Any) -> None:
        self.attributes.set(obj, name, value)

    def del_attr(self, obj: Any, name: str) -> None:
        self.attributes.delete(obj, name)

    def by_own_method(self, method: Any, name: str, obj: Any, *args: Any) -> Any:
        """What a special method gives, ``method`` of the object's class; ABSENT where that is C's own, or nothing."""
        if is_replaced(method, name):
            return self.call(self.attributes.bind(method, obj, type(obj)), [*args], {})
        return self.call(method, [obj, *args], {}) if is_kind(method, types.FunctionType) else ABSENT

    def get_item(self, obj: Any, key: Any) -> Any:
        obj = natives.specialised(obj) if type(obj) is Text else obj
        kind = type(obj)
        if kind is TensorProxy:
            return self.tensors.get_item(obj, self.tensor_index(obj, key))
        if is_kind(obj, SymbolicObject):
            return obj.item(key)
        if kind in (str, bytes, range, torch.Size) or kind is tuple:
            return self.sequence_item(obj, key)
        self.refuse_alien(obj)
        obj = self.objects.seen_through(obj)
        kind = type(obj)
        if is_kind(obj, type):
            return self.class_subscript(obj, key)
        method = self.attributes.on_type(kind, "__getitem__")
        if (found := self.by_own_method(method, "__getitem__", obj, key)) is not ABSENT:
            return found
        base = with_items(kind)
        if kind in (list, dict) and type(key) in OPEN_KEYS and (found := self.found_in_table(obj, key)) is not ABSENT:
            return found
        if base in DICTS:
            return self.dict_item(obj, kind, key)
        if base in LISTS and (found := self.objects.item_from_end(obj, key)) is not ABSENT:
            return found
        if type(key) is slice and (tail := self.tails.at(obj, key)) is not None:
            return self.objects.made(tail)
        if base in LISTS and (record := self.objects.record_of(obj)) is not None and type(key) in (*OPEN_KEYS, slice):
            at_key = self.objects.at_computed_slice if type(key) is slice else self.objects.at_computed_key
            if (found := at_key(record, key)) is not UNREAD:
                return found
        if base in LISTS or base is tuple:
            return self.sequence_item(self.objects.contents(obj) if base in LISTS else obj, key)
        if method is ABSENT:
            raise TypeError(f"{type_name(kind)!r} object is not subscriptable")
        if kind is re.Match:
            return self.call(obj.group, [key], {})
        if is_array(obj) and (found := self.array_inputs.item(obj, key)) is not None:
            return found
        raise Break("item of a C object", kind.__name__, "read it outside of the step")

    def tensor_index(self, tensor: TensorProxy, key: Any) -> Any:
        """What a tensor is indexed with, as an operator takes it."""
        key = self.plain_contents(self.with_numbers(as_indices(key)))
        if is_varying_list(key):
            key = self.index_of(tensor, key)
        elif type(key) is tuple:
            key = tuple(self.index_of(tensor, part) if is_varying_list(part) else part for part in key)
        return without_arrays(self.array_inputs.as_index(key))

    def index_of(self, tensor: TensorProxy, numbers: list) -> TensorProxy:
        """The tensor that torch makes of a list of ints: its own index would make constants of them."""
        return cast(TensorProxy, self.call(torch.tensor, [numbers], {"device": tensor.fake.device}))

    def with_numbers(self, key: Any) -> Any:
        """An index with numbers for the tensors that bound its slices (torch asks them for ``__index__``). A flag in it
        is this call's, under a guard: there it is a mask, and no position."""
        if type(key) is tuple:
            return tuple(map(self.with_numbers, key))
        if type(key) is not slice:
            return natives.specialised(key) if type(key) is Number and key.kind is bool else key
        return slice(*(self.bound(part) for part in (key.start, key.stop, key.step)))

    def bound(self, part: Any) -> Any:
        if type(part) is Bound:
            return part.number
        if not is_kind(part, TensorProxy) or part.fake.dtype not in INTEGERS:
            return part
        return part if (number := self.tensors.item(part)) is None else number

    def sequence_item(self, sequence: Any, key: Any) -> Any:
        if type(sequence) is tuple and type(key) in OPEN_KEYS:
            if (found := self.found_in_table(sequence, key)) is not ABSENT:
                return found
        key = self.as_index(key)
        own = self.calls.is_own(type(sequence), "__getitem__")  # which asks for its base's
        found = with_items(type(sequence)).__getitem__(sequence, key) if own else sequence[key]
        return self.objects.made(found) if is_kind(key, slice) else found

    def found_in_table(self, table: Any, key: Any) -> Any:
        """``table[key]`` as a node, where only the running step knows the key, a number, and the table is of plain
        numbers and texts; else ABSENT."""
        record = self.objects.record_of(table)
        if record is not None and (record.late or self.objects.has_other_items_each_time(record)):
            return ABSENT
        if record is not None and record.shadow is None and not is_table(record.obj):
            return ABSENT  # (its other items are not read)
        items = table if type(table) is tuple else self.objects.contents(table)
        number = self.numbers.known(key) if is_table(items) else None
        return ABSENT if number is None else self.numbers.apply(operator.getitem, items, number)

    def as_index(self, key: Any) -> Any:
        """What a sequence is indexed with, a number or a slice of numbers; ``__index__`` of the user's is interpreted.

        A slice asks its step first (PySlice_Unpack, Objects/sliceobject.c).
        """
        if is_kind(key, slice):
            step = None if key.step is None else self.as_index(key.step)
            start = None if key.start is None else self.as_index(key.start)
            return slice(start, None if key.stop is None else self.as_index(key.stop), step)
        key = natives.specialised(key)
        if is_kind(key, TensorProxy):
            known = number_of(key.node)
            key = known if known is not None else whole if type(whole := constant_number(key.node)) is int else key
        if is_kind(key, TensorProxy):
            raise Break(
                "tensor read as a number",
                "a tensor indexes a Python sequence",
                "stack a sequence of tensors and index the result; loop over one of modules and give each its rows",
            )
        kind = type(key)
        if kind not in ATOMS:
            method = ABSENT if issubclass(kind, int) else self.attributes.on_type(kind, "__index__")
            if is_kind(method, types.FunctionType):
                key = self.call(method, [key], {})
                if not is_kind(key, int):
                    raise TypeError(f"__index__ returned non-int (type {type_name(type(key))})")
            else:
                self.guard_operators(key, ("__index__",))
        return key

    def dict_item(self, obj: Any, kind: type, key: Any) -> Any:
        if (record := self.objects.record_of(obj)) is not None:
            found = self.objects.dict_get(record, own_key(self, key, obj))
        else:
            found = dict.get(obj, new_key(self, key, obj), ABSENT)
        if found is not ABSENT:
            return found
        missing = self.attributes.on_type(kind, "__missing__")
        if is_kind(missing, types.FunctionType):
            return self.call(missing, [obj, key], {})
        if missing is collections.defaultdict.__missing__:
            factory = self.attributes.get(obj, "default_factory")
            if factory is not None:
                value = self.call(factory, [], {})
                if not MISSING_IS_SET:
                    return self.call(dict.setdefault, [obj, key, value], {})
                self.set_item(obj, key, value)
                return value
        raise KeyError(key)

    def class_subscript(self, cls: type, key: Any) -> Any:
        method = self.attributes.on_type(type(cls), "__getitem__")
        if is_kind(method, types.FunctionType):
            return self.call(method, [cls, key], {})
        name = "__class_getitem__"
        self.attributes.rely_on(cls, name)
        self.attributes.rely_on(type(cls), name, "__getattr__")  # (type_getitem asks for an attribute)
        own = look_up(cls, name)
        if is_kind(own, classmethod | staticmethod | types.FunctionType):
            return self.call(self.get_attr(cls, name), [key], {})
        if own is ABSENT and any("__getattr__" in base.__dict__ for base in inspect.getmro(type(cls))):
            raise Break("item of a class", f"{type(cls).__qualname__}.__getattr__ is asked for it", "it runs natively")
        return self.objects.made(cls[key])  # type: ignore[index]

    def set_item(self, obj: Any, key: Any, value: Any) -> None:
        kind = type(obj)
        if kind is TensorProxy:
            value = without_arrays(self.plain_contents(self.array_inputs.as_written(value)))
            self.tensors.set_item(obj, self.tensor_index(obj, key), value)
            return
        method = self.attributes.on_type(kind, "__setitem__")
        if self.by_own_method(method, "__setitem__", obj, key, value) is not ABSENT:
            return
        if method is ABSENT:
            raise TypeError(f"{type_name(type_of(obj))!r} object does not support item assignment")
        base = derived_from(kind, CONTAINERS)
        if base is None:
            raise Break("item of a C object is set", kind.__name__, "set it outside of the step")
        record = self.objects.record_of(obj)
        if base in DICTS and record is not None:
            self.objects.dict_set(record, own_key(self, key, obj), value)
            return
        self.objects.touch(obj, place=item_of(self.objects, obj, key))
        if record is not None and self.objects.place_is_open(record, key):
            length = self.objects.open_length(record)
            if self.truth(self.compare("<=", 0, key)) and self.truth(self.compare("<", key, length)):
                self.objects.write_late(record, key, value)
                return
        target = self.objects.contents(obj)
        if base in DICTS:
            base.__setitem__(target, new_key(self, key, obj), value)
        else:
            if is_kind(key, slice):
                value = self.calls.fast(value)
            base.__setitem__(target, self.as_index(key), value)

    def del_item(self, obj: Any, key: Any) -> None:
        kind = type(obj)
        method = self.attributes.on_type(kind, "__delitem__")
        if self.by_own_method(method, "__delitem__", obj, key) is not ABSENT:
            return
        base = derived_from(kind, CONTAINERS)
        if base is not None and method is ABSENT:
            raise TypeError(f"{type_name(kind)!r} object doesn't support item deletion")
        if base is None:
            raise Break("item of a C object is deleted", kind.__name__, "delete it outside of the step")
        record = self.objects.record_of(obj)
        if base in DICTS and record is not None:
            if not self.objects.dict_delete(record, own_key(self, key, obj)):
                raise KeyError(key)
            return
        self.objects.touch(obj)
        base.__delitem__(self.objects.contents(obj), new_key(self, key, obj) if base in DICTS else self.as_index(key))

    def plain_contents(self, value: Any) -> Any:
        """Known containers in an argument replaced by what stands for them, so that C code may read them."""
        kind = type(value)
        if kind in CONTAINERS:
            value = self.objects.contents(value)
        elif is_kind(value, tuple) and hasattr(kind, "_fields") and "__getitem__" not in kind.__dict__:
            return tuple(self.plain_contents(self.get_item(value, i)) for i in range(len(value)))
        elif kind is not tuple:
            return value
        parts = value.values() if kind in DICTS else value
        if not any(type(part) in CONTAINERS or type(part) is tuple for part in parts):
            return value
        if kind in DICTS:
            return {k: self.plain_contents(v) for k, v in value.items()}
        return kind(map(self.plain_contents, value))

    def kept_in_an_exception(self, value: Any) -> Any:
        """What an exception that is made of the argument keeps of it: a named tuple is one still."""
        return value if is_kind(value, tuple) and type(value) is not tuple else self.plain_contents(value)

    # ------------------------------------------------------------------------------------------------------------------
    # Iteration
    # ------------------------------------------------------------------------------------------------------------------

    def get_iter(self, value: Any) -> Any:
        operand = value
        value = natives.specialised(value) if type(value) is Text else value
        kind = type(value)
        if kind in (TensorProxy, IndexList):
            return self.loops.rows(value)
        if kind in ROWS:
            return value.begin() if is_kind(value, TensorRows) else value
        if is_kind(value, SymbolicObject):
            return value.iterate()
        self.refuse_alien(value)
        value = self.objects.seen_through(value)
        kind = type(value)
        if kind is frozenset:
            self.objects.settle_order(value)
        if kind in (tuple, str, bytes, frozenset, range) or kind in natives.VIEWS or kind is torch.Size:
            return self.iterators.begins(operand, iter(value))
        if is_kind(value, natives.ITERATORS):
            self.objects.writes += 1  # whoever asks for it may advance it: a break after that finds it changed
            if not self.objects.is_new(value) and not self.walks.can_be_told(value):
                self.walks.refuse(value)
            self.iterators.passes(value)
            return value
        method = self.attributes.on_type(kind, "__iter__")
        if (found := self.by_own_method(method, "__iter__", value)) is not ABSENT:
            return found
        if (base := derived_from(kind, (*CONTAINERS, tuple))) is not None:
            held = self.objects.contents(value, iterated=True) if base in CONTAINERS else value
            if base in SETS:
                self.objects.settle_order(held)
            return self.iterators.begins(operand, base.__iter__(held))
        if is_kind(value, type) and is_kind(
            method := self.attributes.on_type(type(value), "__iter__"), types.FunctionType
        ):
            return self.call(method, [value], {})
        if method is ABSENT and self.attributes.on_type(kind, "__getitem__") is ABSENT:
            raise TypeError(f"{type_name(kind)!r} object is not iterable")
        if self.has_items(value):
            return self.call_function(self.calls.substitute(forwards), [value], {})
        raise Break("iteration over a C object", kind.__name__, "iterate over a list of it")

    def has_items(self, value: Any) -> bool:
        """Whether it is an array of numpy's that existed before, whose items are asked for one after another."""
        found = is_array(value) and value.ndim > 0
        return found and (not len(value) or self.array_inputs.item(value, 0) is not None)

    def native_iter(self, value: Any, in_loop: bool = False) -> Any:
        """An iterator over `value` that C code may be given: one in Python is advanced in the trace."""
        if (record := self.objects.record_of(value)) is not None:
            self.objects.refuse_growing(record, in_loop)
        if is_kind(value, View) and not in_loop:
            value.refuse("the items")
        iterator = self.get_iter(value)
        if type(iterator) in ROWS:
            loops = self.loops
            loops.sized.refuse(iterator, "in a builtin")
        self.iterators.takes(value, iterator)
        native = is_kind(iterator, natives.ITERATORS) and self.objects.is_new(iterator)
        return iterator if native else Pulled(self, iterator)

    def pairs(self, maker: Any, values: list, kwargs: dict[str, Any]) -> Any:
        """What ``enumerate`` or ``zip`` gives of experts that were hit, else None."""
        return self.loops.pairs(maker, values, kwargs)

    def get_yield_from_iter(self, frame: Frame, value: Any) -> Any:
        iterator = super().get_yield_from_iter(frame, value)
        if type(iterator) in ROWS:
            self.next_item(iterator)  # is a graph break
        if is_kind(iterator, natives.ITERATORS) and not self.objects.is_new(iterator):
            self.walks.refuse(iterator)
        return iterator

    def next_item(self, iterator: Any) -> Any:
        if type(iterator) in ROWS:
            return self.loops.next_row(cast(Any, iterator))
        if is_kind(iterator, SymbolicObject):
            return iterator.advance()
        if not is_kind(iterator, natives.ITERATORS):
            method = self.attributes.on_type(type(iterator), "__next__")
            if is_kind(method, types.FunctionType):
                try:
                    return self.call(method, [iterator], {})
                except StopIteration:
                    return STOP
            raise Break("iterator in C", type(iterator).__name__, "iterate over a list of it")
        if not self.objects.is_new(iterator):
            return self.walks.next_item(iterator)
        for part in parts_of(iterator):
            self.objects.touch(part)
        value = next(cast(Iterator, iterator), STOP)
        if type(iterator) is itertools.groupby and value is not STOP:
            self.objects.made(value[1])  # type: ignore[index]
        return value if value is STOP else self.objects.made(value)

    def unpack(self, value: Any, count: int) -> list[Any]:
        if is_kind(value, TensorProxy):
            value = self.tensors.rows_for_unpacking(value, count)
        elif type(value) in LISTS:
            value = self.objects.contents(value)
        self.attributes.rely_on(type(value), "__iter__", "__getitem__")
        return super().unpack(value, count)

    def unpack_ex(self, value: Any, before: int, after: int) -> list[Any]:
        self.attributes.rely_on(type(value), "__iter__", "__getitem__")
        items = super().unpack_ex(value, before, after)
        self.objects.made(items[before])
        return items

    def drain(self, value: Any, hinted: bool = True) -> list[Any]:
        if type(value) in ROWS:
            self.next_item(value)  # is a graph break
        known = not is_kind(value, natives.ITERATORS) or self.objects.is_new(value)
        return super().drain(value, hinted) if known else list(Pulled(self, value))

    def length_hint(self, value: Any) -> None:
        if not type(value).__module__.startswith("moebius."):  # a stand-in has nothing to tell
            super().length_hint(value)

    # ------------------------------------------------------------------------------------------------------------------
    # Displays
    # ------------------------------------------------------------------------------------------------------------------

    def build_list(self, items: list[Any]) -> Any:
        return self.lists.make(items)

    def build_tuple(self, items: list[Any]) -> Any:
        return self.objects.made(tuple(items))

    def build_map(self, pairs: list[tuple[Any, Any]]) -> Any:
        made: dict[Any, Any] = {}
        for key, value in pairs:
            made[new_key(self, key, made, True)] = value
        return self.objects.made(made)

    # The containers that displays and comprehensions fill are new, except after a graph break in the middle of one.

    def list_append(self, target: Any, value: Any) -> None:
        if type(target) is ConditionalList:
            target.append(value)
        else:
            self.calls.container_method(target, list, "append", [value], {})

    def list_extend(self, target: Any, values: Any) -> None:
        kind = type_of(values)
        if all(self.attributes.on_type(kind, name) is ABSENT for name in ("__iter__", "__getitem__")):
            raise TypeError(f"Value after * must be an iterable, not {type_name(kind)}")
        self.calls.container_method(target, list, "extend", [values], {})

    def list_to_tuple(self, values: Any) -> Any:
        return self.objects.made(tuple(self.objects.contents(values)))

    def map_add(self, target: Any, key: Any, value: Any) -> None:
        self.set_item(target, key, value)

    def dict_update(self, target: Any, other: Any) -> None:
        if not issubclass(type_of(other), dict):
            try:
                keys = self.attributes.get(other, "keys")
            except AttributeError:
                raise TypeError(f"'{type_name(type_of(other))}' object is not a mapping") from None
            other = self.calls.by_keys(other, keys)
        self.calls.container_method(target, dict, "update", [other], {})

    def dict_merge(self, target: Any, other: Any, function: Any) -> None:
        if self.objects.record_of(target) is not None:
            hint = "build the keyword arguments before the call"
            raise Break("keyword arguments built across a graph break", "f(**a, **b)", hint)
        super().dict_merge(target, self.mapping(other), function)

    def mapping(self, other: Any) -> Any:
        return dict(self.calls.mapping_or_items(other, dict)) if hasattr(type(other), "keys") else other


def is_table(items: Any) -> bool:
    """Whether a list, tuple or dict is a table of plain numbers and texts, which a graph can look into."""
    entries = items.values() if type(items) is dict else items
    keys = items if type(items) is dict else ()
    plain = (int, float, bool, str)
    return (
        0 < len(items) <= LARGE_TABLE and all(type(v) in plain for v in entries) and all(type(k) in plain for k in keys)
    )
