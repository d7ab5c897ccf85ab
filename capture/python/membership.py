"""``item in container`` of traced values."""

from __future__ import annotations

import enum
import operator
from typing import Any, cast

import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import type_name
from moebius.interpreter.tables.texts import NOT_A_CONTAINER

from ..heap.records import DICTS, SETS, raw_items, with_items
from ..hook import ABSENT
from ..tensors import tensor_class
from ..values.numbers import Number
from ..values.values import ATOMS, Break, TensorProxy, type_of
from . import natives
from .open_sets import OpenSet
from .own_hashes import new_key, own_key
from .parts import Parts


class Membership(Parts):
    """What ``in`` asks of each kind of container."""

    def is_item_of(self, item: Any, tensor: TensorProxy) -> Any:
        """``Tensor.__contains__``: a yes or no of the graph."""
        tensor_class.rely_on(self.objects.guards, tensor.cls, "__contains__")
        if self.tensors.whole_step and type(item) in (int, float, bool, Number, TensorProxy):
            found = self.tensors.function(torch.any, (self.compare("==", item, tensor),), {})
            if (answer := self.tensors.item(found)) is not None:
                return answer
        raise Break("tensor read as a number", "membership in a tensor", "use (t == x).any()")

    def contains(self, item: Any, container: Any) -> Any:
        container = self.objects.seen_through(container)
        kind = type(container)
        if kind is TensorProxy:
            return self.is_item_of(item, container)
        if kind is OpenSet:
            return container.contains(item)
        self.refuse_alien(container)
        if (number := self.numbers.known(item)) is not None:
            if (keys := self.calls.plain_items(container)) is not None:
                return self.truth(self.numbers.look_up(operator.contains, keys, number))
        record = self.objects.record_of(container)
        asks = kind not in ATOMS and not is_kind(container, natives.VIEWS)
        method = self.attributes.on_type(kind, "__contains__") if asks else ABSENT
        if (found := self.by_own_method(method, "__contains__", container, item)) is not ABSENT:
            return self.truth(found)
        base = with_items(kind)
        if base in DICTS:
            if record is not None:
                return self.objects.dict_get(record, own_key(self, item, container)) is not ABSENT
            return dict.__contains__(container, new_key(self, item, container))
        if base in SETS or base is frozenset or is_kind(container, type({}.keys())):
            return new_key(self, item, container) in self.objects.contents(container)
        if kind in (str, bytes, range):
            return (natives.specialised(item) if type(item) is torch.SymBool else item) in container
        if base is not None or kind is torch.Size or is_kind(container, natives.VIEWS):
            return any(self.is_or_equals(x, item) for x in raw_items(self.objects.contents(container)))
        if method is ABSENT and not hasattr(kind, "__contains__"):
            items = self.items_searched(container)
            return any(self.is_or_equals(x, item) for x in items)
        if is_kind(container, type) and issubclass(type(container), enum.EnumMeta):
            return item in cast(Any, container)
        raise Break("membership in a C object", kind.__name__, "test it outside of the step")

    def items_searched(self, container: Any) -> Any:
        """What ``in`` iterates over where there is no ``__contains__`` (_PySequence_IterSearch, Objects/abstract.c)."""
        try:
            return self.native_iter(container)
        except TypeError as error:
            self.machine.swallow(error)
        raise TypeError(NOT_A_CONTAINER.format(type=type_name(type_of(container))))
