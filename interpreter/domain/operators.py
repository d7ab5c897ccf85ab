"""Operators, truth, identity and comparison, with Python's rules of precedence between the operands' dunders."""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FunctionType, WrapperDescriptorType
from typing import Any

from ..errors import UNROUTED
from ..natives import is_sequence_slot
from ..sentinels import STOP
from ..tables.texts import NOT_A_BOOL, NOT_A_CONTAINER
from .core import MISSING, PLAIN, Core, is_a, is_heap, is_subtype, lookup, special, type_name, wrong_type

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "&": operator.and_, "//": operator.floordiv, "<<": operator.lshift, "@": operator.matmul,
    "*": operator.mul, "%": operator.mod, "|": operator.or_, "**": operator.pow, ">>": operator.rshift,
    "-": operator.sub, "/": operator.truediv, "^": operator.xor,
    "+=": operator.iadd, "&=": operator.iand, "//=": operator.ifloordiv, "<<=": operator.ilshift,
    "@=": operator.imatmul, "*=": operator.imul, "%=": operator.imod, "|=": operator.ior, "**=": operator.ipow,
    ">>=": operator.irshift, "-=": operator.isub, "/=": operator.itruediv, "^=": operator.ixor,
}  # fmt: skip
DIVIDING = frozenset({"//", "%", "//=", "%="})  # from 3.12 on C code calls Lib/_pylong.py for long integers
STEMS = {
    "+": "add", "&": "and", "//": "floordiv", "<<": "lshift", "@": "matmul", "*": "mul", "%": "mod", "|": "or",
    "**": "pow", ">>": "rshift", "-": "sub", "/": "truediv", "^": "xor",
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
COMPARE_DUNDERS = {
    "<": ("__lt__", "__gt__"), "<=": ("__le__", "__ge__"), "==": ("__eq__", "__eq__"), "!=": ("__ne__", "__ne__"),
    ">": ("__gt__", "__lt__"), ">=": ("__ge__", "__le__"),
}  # fmt: skip
UNARIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "-": (operator.neg, "__neg__"), "+": (operator.pos, "__pos__"), "~": (operator.invert, "__invert__"),
}  # fmt: skip
# What a comparison method's descriptor may raise (Objects/typeobject.c slot_tp_richcompare): then there is none.
CLEARED = Exception if sys.version_info < (3, 14) else AttributeError
# Nor do len() and truth of these (a weakref.proxy's do).
LENGTH_IS_C = PLAIN | {list, tuple, dict, set, frozenset, bytearray, range}


def unsupported(op: str, left: type, right: type) -> TypeError:
    """The error of an operator or a comparison that no operand of these types has."""
    kinds = f"'{type_name(left)}' and '{type_name(right)}'"
    if op in COMPARISONS:
        return TypeError(f"'{op}' not supported between instances of {kinds}")
    return TypeError(f"unsupported operand type(s) for {'** or pow()' if op == '**' else op}: {kinds}")


class Operators(Core):
    """Unary and binary operators, comparison, containment, truth, length."""

    def unary(self, op: str, value: Any) -> Any:
        """op is '-', '+', '~' or 'not'."""
        if op == "not":
            return not self.truth(value)
        operation, dunder = UNARIES[op]
        raw = special(type(value), dunder)
        if type(value) in PLAIN and type(value) is not bool:  # ~ of a bool warns
            return operation(value)
        return self.native(operation, value) if raw is None else self.call_special(raw, value, [])

    def binary(self, op: str, left: Any, right: Any) -> Any:
        """op as in `dis`: '+', '@', …; the in-place ones end in '='."""
        left_type, right_type = type(left), type(right)
        if left_type in PLAIN and right_type in PLAIN and op not in DIVIDING:
            return OPERATIONS[op](left, right)
        if not is_heap(left_type) and not is_heap(right_type):
            return self.native(OPERATIONS[op], left, right)
        return self.binary_by_dunder(op, left, right)

    def binary_by_dunder(self, op: str, left: Any, right: Any) -> Any:
        """PEP 203 and the data model's "Emulating numeric types", for operands with dunders in Python."""
        left_type, right_type = type(left), type(right)
        plain_op = op[:-1] if op[-1] == "=" else op
        stem = STEMS[plain_op]
        forward, reflected, in_place = f"__{stem}__", f"__r{stem}__", f"__i{stem}__"
        left_raw, right_raw = special(left_type, forward), special(right_type, reflected)
        in_place_raw = special(left_type, in_place) if op is not plain_op else None
        if left_raw is None and right_raw is None and in_place_raw is None:
            return self.native(OPERATIONS[op], left, right)
        if op is not plain_op:
            if in_place_raw is not None:
                result = self.call_special(in_place_raw, left, [right])
                if result is not NotImplemented:
                    return result
            elif lookup(left_type, in_place) is not MISSING:
                # a C type's in-place method: it may decline, or (a sequence's) raise
                native = lookup(left_type, in_place)
                # += of a subclass of such a sequence is a number slot as well (Objects/typeobject.c update_one_slot)
                as_number = not is_sequence_slot(native) or op == "+=" and native.__objclass__ is not left_type
                if right_raw is None or as_number:
                    result = self.native(native, left, right)
                    if result is not NotImplemented:
                        return result
        result = self.binary_slots(left, right, forward, reflected)
        if result is not NotImplemented:
            return result
        if plain_op in ("+", "*"):
            result = self.sequence_slots(op, left, right, forward, in_place)
            if result is not NotImplemented:
                return result
        raise unsupported(op, left_type, right_type)

    def sequence_slots(self, op: str, left: Any, right: Any, forward: str, in_place: str) -> Any:
        """Objects/abstract.c PyNumber_Add, PyNumber_Multiply and kin once both operands' number slots have declined."""
        left_type, right_type = type(left), type(right)
        methods = [lookup(left_type, in_place)] if op[-1] == "=" else []
        owner, other, other_type = left, right, right_type
        method = next((found for found in (*methods, lookup(left_type, forward)) if is_sequence_slot(found)), None)
        if method is None and forward == "__mul__" and is_sequence_slot(lookup(right_type, "__rmul__")):
            owner, other, other_type, method = right, left, left_type, lookup(right_type, "__mul__")
        if method is None:
            return NotImplemented
        if forward == "__mul__" and lookup(other_type, "__index__") is MISSING:
            raise TypeError(f"can't multiply sequence by non-int of type '{type_name(other_type)}'")
        return self.native(method, owner, other)

    def binary_slots(self, left: Any, right: Any, forward: str, reflected: str) -> Any:
        """Objects/abstract.c binary_op1: forward, reflected, or the other way round for a subclass on the right."""
        left_type, right_type = type(left), type(right)
        own = lookup(left_type, forward)
        other = lookup(right_type, reflected) if right_type is not left_type else MISSING
        # (sq_concat and sq_repeat come after the number slots)
        own, other = (MISSING if is_sequence_slot(slot) else slot for slot in (own, other))
        slots = [(own, left, right), (other, right, left)]
        if other is not MISSING and is_subtype(right_type, left_type):
            inherited = lookup(left_type, reflected)
            if own is MISSING or inherited is MISSING or inherited is not other:
                slots.reverse()
        for raw, obj, argument in slots:
            result = NotImplemented if raw is MISSING else self.try_slot(raw, obj, argument)
            if result is not NotImplemented:
                return result
        return NotImplemented

    def try_slot(self, raw: Any, obj: Any, argument: Any) -> Any:
        if type(raw) is WrapperDescriptorType:
            return self.native(raw, obj, argument)
        return self.call_special(raw, obj, [argument])

    def compare(self, op: str, left: Any, right: Any) -> Any:
        """op is one of < <= == != > >=. The result is whatever the dunder returns."""
        left_type, right_type = type(left), type(right)
        if left_type in PLAIN and right_type in PLAIN:
            return COMPARISONS[op](left, right)
        forward, reflected = COMPARE_DUNDERS[op]
        own, other = special(left_type, forward), special(right_type, reflected)
        if op == "!=":  # object.__ne__ calls __eq__
            own = own or self.inverted_eq(left_type)
            other = other or self.inverted_eq(right_type)
        if own is None and other is None:
            return self.native(COMPARISONS[op], left, right)
        ways = [(left, right, forward), (right, left, reflected)]
        if right_type is not left_type and is_subtype(right_type, left_type):
            ways.reverse()
        for obj, argument, dunder in ways:
            result = self.rich_compare(obj, argument, dunder)
            if result is not NotImplemented:
                return result
        if op == "==":
            return left is right
        if op == "!=":
            return left is not right
        raise unsupported(op, left_type, right_type)

    def inverted_eq(self, tp: type) -> Any:
        """A type's __eq__ where it is Python and its __ne__ is object's, which inverts it."""
        return special(tp, "__eq__") if lookup(tp, "__ne__") is object.__ne__ else None

    def rich_compare(self, obj: Any, other: Any, dunder: str) -> Any:
        raw = special(type(obj), dunder)
        if type(raw) is FunctionType:
            return self.call_function(raw, [obj, other], {})
        if raw is not None:
            try:
                bound = self.bind_descriptor(raw, obj, type(obj))
            except Exception as error:
                if not is_a(error, CLEARED) or is_a(error, UNROUTED):
                    raise
                self.machine.swallow(error)
                return NotImplemented
            return self.call(bound, [other], {})
        if dunder == "__ne__":
            raw = self.inverted_eq(type(obj))
            if raw is not None:
                result = self.call_special(raw, obj, [other])
                return result if result is NotImplemented else not self.truth(result)
        native = lookup(type(obj), dunder)
        return NotImplemented if native is MISSING else self.native(native, obj, other)

    def is_same(self, left: Any, right: Any) -> bool:
        return left is right

    def is_none(self, value: Any) -> bool:
        return value is None

    def truth(self, value: Any) -> bool:
        tp = type(value)
        if not is_heap(tp):
            return bool(value) if tp in LENGTH_IS_C else self.native(bool, value)
        raw = special(tp, "__bool__")
        if raw is not None:
            result = self.call_special(raw, value, [])
            if type(result) is not bool:
                raise wrong_type(NOT_A_BOOL, result, value)
            return result
        if lookup(tp, "__bool__") is MISSING and special(tp, "__len__") is not None:
            return self.length(value) != 0
        return self.native(bool, value)

    def length(self, value: Any) -> int:
        raw = special(type(value), "__len__")
        if raw is None:
            return len(value) if type(value) in LENGTH_IS_C else self.native(len, value)
        return len(_Length(self.call_special(raw, value, [])))

    def contains(self, item: Any, container: Any) -> bool:
        tp = type(container)
        raw = special(tp, "__contains__")
        if raw is not None:
            return self.truth(self.call_special(raw, container, [item]))
        if tp in PLAIN:
            return item in container
        if tp is list or tp is tuple:
            for value in container:
                if value is item or self.truth(self.compare("==", value, item)):
                    return True
            return False
        if lookup(tp, "__contains__") is MISSING and (
            special(tp, "__iter__") is not None or special(tp, "__getitem__") is not None
        ):
            return self.search(self.begin_search(container), item)
        return self.native(operator.contains, container, item)

    def begin_search(self, container: Any) -> Any:
        """Objects/abstract.c _PySequence_IterSearch: any TypeError of ``__iter__`` becomes this one."""
        try:
            return self.get_iter(container)
        except TypeError as error:
            self.machine.swallow(error)
        raise wrong_type(NOT_A_CONTAINER, container)

    def search(self, iterator: Any, item: Any) -> bool:
        while (value := self.next_item(iterator)) is not STOP:
            if value is item or self.truth(self.compare("==", value, item)):
                return True
        return False


class _Length:
    """Hands a __len__ result to len(), for its exact checks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return self.value
