"""Operators, comparison and truth on traced values."""

from __future__ import annotations

import collections
import math
import operator
import types
from collections.abc import Set
from typing import Any

import numpy as np
import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import lookup, special, type_name
from moebius.interpreter.domain.operators import COMPARE_DUNDERS, COMPARISONS, unsupported
from moebius.interpreter.domain.operators import OPERATIONS as OPERATORS
from moebius.interpreter.domain.operators import STEMS as DUNDERS

from ..heap.objects import identified
from ..heap.records import CONTAINERS, DICTS, derived_from
from ..hook import ABSENT
from ..regions.autograd_joins import refuse_one_or_two
from ..regions.loop_regions import ROWS
from ..tensors.arrays import Array
from ..tensors.eithers import Either
from ..tensors.folding import constant_truth
from ..torch_facts import torch_private, torch_sizes
from ..values import numbers
from ..values.numbers import UNARY, Number, example, number_kind
from ..values.numpy_numbers import NUMPY_NUMBERS, leaves_to_tensors
from ..values.opaque_tensor import OpaqueTensor, Varying
from ..values.values import (
    ATOMS,
    IDENTITIES,
    SYMBOLIC,
    Break,
    SymbolicObject,
    TensorMethod,
    TensorProxy,
    UndefinedAfterLoop,
    type_of,
)
from ..values.views import View
from . import natives
from .enums import plain_member
from .membership import Membership
from .parts import is_alien
from .texts import Text, texts

READ_BY_C = (*CONTAINERS, frozenset)  # and what is derived from one
OPEN_NUMBERS = (Number, *SYMBOLIC)
WITH_SIZES = frozenset((bool, int, float, complex, *SYMBOLIC))
FLOATS = frozenset((float, torch.SymFloat))
NUMBERS_AND_SIZES = NUMPY_NUMBERS | WITH_SIZES | {Number}
NOT_NUMBERS = frozenset((str, type(None)))
NEVER_SYMBOLIC = frozenset(("<<", ">>"))  # sympy's is not Python's


def is_unknown_to_sympy(op: str, left: Any, right: Any) -> bool:
    """Whether sympy, or torch's ranges, would not say of these operands what Python's arithmetic does."""
    numbers = [v for v in (left, right) if type(v) in (int, bool, float)]
    if {type(left), type(right)}.isdisjoint(FLOATS):
        return op == "**" and numbers == [left] and left < 0  # its range has no bounds
    if op == "%" or not all(map(math.isfinite, numbers)):
        return True
    return 0 in numbers and op != "+" and not (op == "-" and type(left) in SYMBOLIC)  # the sign of a zero


SIMPLE = frozenset({int, float, str, bool, bytes, type(None)})
TRUE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, types.MethodType)  # always, in C
NAMES = DUNDERS | {op: forward.strip("_") for op, (forward, _) in COMPARE_DUNDERS.items()}
# make another container of one
COPYING = frozenset("or_ add mul imul __or__ __ror__ __add__ __mul__ __rmul__ __imul__".split())
REPEATS = frozenset(("mul", "imul", "__mul__", "__imul__", "__rmul__"))
SEQUENCES = (list, tuple, str, bytes, bytearray, collections.deque)


class Operators(Membership):
    """What operators mean: plain on atoms, nodes on tensors, guarded dunders on objects."""

    def unary(self, op: str, value: Any) -> Any:
        if op == "not":
            unknown = type(value) is Number and value.kind is bool and not value.known
            return self.numbers.apply(operator.not_, value) if unknown else not self.truth(value)
        kind = type(value)
        if kind in (np.ndarray, Array) and (found := self.array_calls.unary(op, value)) is not ABSENT:
            return found
        if kind is Number or kind in NUMPY_NUMBERS:
            return self.numbers.apply(UNARY[op], value)
        if kind is Either:
            return value.unary(op)
        if kind in SIMPLE or kind in SYMBOLIC or kind is TensorProxy:
            if kind is TensorProxy:
                return self.tensors.function(UNARY[op], (value,), {})
            return self.symbolic_unary(op, value) if kind in SYMBOLIC else super().unary(op, value)
        self.refuse_alien(value)
        self.guard_operators(value, ("__neg__", "__pos__", "__invert__"))
        return self.objects.made(super().unary(op, value))

    def symbolic_unary(self, op: str, value: Any) -> Any:
        if type(value) is torch.SymBool:
            return UNARY[op](self.truth(value))
        UNARY[op](example(value))  # Python's own error, where there is one
        return -value - 1 if op == "~" else UNARY[op](value)

    def binary(self, op: str, left: Any, right: Any) -> Any:
        left_kind, right_kind = type(left), type(right)
        if left_kind in SIMPLE and right_kind in SIMPLE:
            return OPERATORS[op](left, right)
        if left_kind is str and op in ("%", "%="):
            return self.percent(left, right)
        if left_kind is Text or right_kind is Text:
            return self.text_binary(op, left, right)
        if (symbolic := symbolic_side(left, right)) is not None:
            return symbolic.binary(op, left, right)
        if np.ndarray in (left_kind, right_kind):
            if (found := self.array_calls.operator(op, left, right)) is not ABSENT:
                return found
        if number_kind(left) in NUMPY_NUMBERS or number_kind(right) in NUMPY_NUMBERS:
            return self.numpy_binary(op.removesuffix("="), left, right)
        if left_kind is TensorProxy or right_kind is TensorProxy:
            return self.tensor_binary(op, left, right)
        if (answer := self.of_the_object(op, left, right)) is not ABSENT:
            return answer
        if (left_kind is Number or right_kind is Number) and op.removesuffix("=") in numbers.OPERATIONS:
            return self.numbers.apply(numbers.OPERATIONS[op.removesuffix("=")], left, right)
        if left_kind in SYMBOLIC or right_kind in SYMBOLIC:
            kinds = {left_kind, right_kind}
            name = op.removesuffix("=")
            if kinds <= WITH_SIZES and name in numbers.OPERATIONS:
                if complex in kinds or name in NEVER_SYMBOLIC or is_unknown_to_sympy(name, left, right):
                    return self.numbers.apply(numbers.OPERATIONS[name], left, right)
            if torch.SymBool in kinds and not (left_kind is right_kind and op in ("&", "|")):
                return self.binary(op, *(self.truth(v) if type(v) is torch.SymBool else v for v in (left, right)))
            if all(k.__module__ == "builtins" or k in SYMBOLIC for k in (left_kind, right_kind)):
                OPERATORS[op.removesuffix("=")](example(left), example(right))  # Python's own error, where there is one
            left, right = (int(v) if type(v) is bool else v for v in (left, right))
            if (left_kind in SIMPLE or left_kind in SYMBOLIC) and (right_kind in SIMPLE or right_kind in SYMBOLIC):
                if op[0] in "/%" or name == "**" and not (type(right) is int and right >= 0):
                    self.look_at_divisor(left if name == "**" else right)
                return OPERATORS[op](torch_sizes.rounded(left), torch_sizes.rounded(right))
            if op not in ("+", "*", "+=", "*="):
                raise Break(
                    "arithmetic on a symbolic size",
                    f"{left_kind.__name__} {op} {right_kind.__name__}",
                    "use plain numbers with sizes",
                )
        if op == "|":  # a mapping proxy hands it on to what it shows, as it does ``==``
            left, right = map(self.objects.seen_through, (left, right))
        self.refuse_alien(left)
        self.refuse_alien(right)
        names = [f"__{n}{DUNDERS[op.removesuffix('=')]}__" for n in ("", "r", "i")]
        for value in (left, right):
            self.guard_operators(value, names)
        if op.endswith("=") and type(left) in CONTAINERS:
            return self.container_in_place(op, left, right)
        if op in ("%", "%=") and issubclass(type(left), str):
            return self.percent(left, right)
        left_value, right_value = self.operand(left), self.operand(right)
        return self.objects.made(
            super().binary(op.removesuffix("=") if type(left) in CONTAINERS else op, left_value, right_value)
        )

    def of_the_object(self, op: str, left: Any, right: Any) -> Any:
        """``number op object`` or the other way round, of a number that the graph computes: what the object's own
        method in Python gives, as int and float leave it to that. ABSENT where neither is such."""
        sides = [kind in OPEN_NUMBERS for kind in (type(left), type(right))]
        value = left if sides[1] else right
        if sides[0] is sides[1] or type(value) in ATOMS or type(value) is complex or is_alien(value):
            return ABSENT
        compares, stem = op in COMPARISONS, DUNDERS.get(op.removesuffix("="), "")
        if compares:
            names = [COMPARE_DUNDERS[op][0 if sides[1] else 1]]
            names += ["__eq__"] if op == "!=" and lookup(type(value), "__ne__") is object.__ne__ else []
        elif sides[1]:
            names = [f"__i{stem}__"] * op.endswith("=") + [f"__{stem}__"]
        else:
            names = [f"__r{stem}__"]
        own = compares or f"__{stem}__" in vars(float)
        if own and sides[0] and type_of(left) is float and issubclass(type(value), int):
            names = []  # (a float knows ints)
        self.attributes.rely_on(type(value), *names)
        methods = [(name, method) for name in names if (method := special(type(value), name)) is not None]
        for name, method in methods:
            answer = self.call_special(method, value, [right if sides[1] else left])
            if answer is not NotImplemented:
                inverted = op == "!=" and name == "__eq__"
                return not self.truth(answer) if inverted else self.objects.made(answer)
        for kind in (int, float):
            if issubclass(type(value), kind):  # a member of an IntEnum: the number that it is
                plain = kind.__pos__(value)
                operands = (left, plain) if sides[0] else (plain, right)
                return self.compare(op, *operands) if compares else self.binary(op, *operands)
        if not methods:
            return ABSENT
        if issubclass(type(value), SEQUENCES):
            detail = f"{op} with a {type(value).__name__}, whose own method leaves it to others"
            raise Break("arithmetic on a symbolic size", detail, "use plain numbers with sizes")
        if op in ("==", "!="):
            return op == "!="
        raise unsupported(op, type_of(left), type_of(right))

    def look_at_divisor(self, divisor: Any) -> None:
        """A guard that a size is not 0: with 0 it may be Python's ZeroDivisionError. Of a number that values decide the
        running step finds that out, so that it is a graph break where a handler of the user's would see the error."""
        if type(divisor) in SYMBOLIC and torch_private.depends_on_values(divisor):
            if self.handles_errors():
                detail = f"division by {divisor}, a number that values decide"
                raise Break("arithmetic that may fail", detail, "it runs natively, and a handler sees its error")
        elif type(divisor) is torch.SymInt:
            bool(divisor == 0)

    def numpy_binary(self, op: str, left: Any, right: Any) -> Any:
        """``left op right``, an operator or a comparison, one of which is a number of numpy's."""
        if issubclass(type(left), TensorProxy):
            right = self.array_inputs.as_number(right)
        elif issubclass(type(right), TensorProxy) and leaves_to_tensors(number_kind(left), NAMES[op]):
            left = self.array_inputs.as_number(left)
        if not any(number_kind(value) in NUMPY_NUMBERS for value in (left, right)):
            return self.tensors.function(COMPARISONS.get(op) or OPERATORS[op], (left, right), {})
        if not all(type(value) in NUMBERS_AND_SIZES for value in (left, right)) or op == "@":
            detail = f"{type_of(left).__name__} {op} {type_of(right).__name__}"
            raise Break("operator of a number of numpy's", detail, "convert it to a plain number: int(x), float(x)")
        return self.numbers.apply(numbers.OPERATIONS[op], left, right)

    def text_binary(self, op: str, left: Any, right: Any) -> Any:
        if op in ("+", "+=") and all(is_kind(v, Text | str) for v in (left, right)):
            return self.texts.make(texts.joined, left, right)
        left, right = (natives.specialised(v, self.calls.known) for v in (left, right))
        return self.binary(op, left, right)

    def tensor_binary(self, op: str, left: Any, right: Any) -> Any:
        names = [f"__{n}{DUNDERS[op.removesuffix('=')]}__" for n in ("", "r")]
        left, right = (plain_member(v) if not any(special(type(v), n) for n in names) else v for v in (left, right))
        if issubclass(type(left), TensorProxy):
            right = self.array_inputs.as_number(right)
        for value in (left, right):
            known = type(value) in (*SIMPLE, *SYMBOLIC, Number, complex, list, tuple)
            if not known and not issubclass(type(value), TensorProxy):
                raise Break(
                    "operator between a tensor and an object",
                    f"tensor {op} {type(value).__name__}",
                    "convert the object to a tensor or a number first",
                )
        if type(left) in (list, tuple) or type(right) in (list, tuple):
            raise Break("operator between a tensor and a sequence", op, "make a tensor of the sequence first")
        in_place = op.endswith("=") and issubclass(type(left), TensorProxy)
        return self.tensors.function(OPERATORS[op if in_place else op.removesuffix("=")], (left, right), {})

    def container_in_place(self, op: str, left: Any, right: Any) -> Any:
        method = {"+=": "extend", "|=": "update", "&=": "intersection_update", "-=": "difference_update"}.get(op)
        if method is None:
            raise Break("in-place operator on a container", f"{type(left).__name__} {op}", "write it as an assignment")
        if type(left) is set and not issubclass(type_of(right), (set, frozenset)):
            return super().binary(op, left, right)  # (methods take any iterable)
        self.calls.container_method(left, type(left), method, [right], {})
        return left

    def operand(self, value: Any) -> Any:
        """A container as the real one that stands for it."""
        return self.objects.contents(value) if type(value) in CONTAINERS else value

    def as_count(self, value: Any) -> Any:
        """What C code takes for an index or a count: what an ``__index__`` in Python gives, else the value itself."""
        if type(value) in ATOMS or is_alien(value):
            return value
        method = self.attributes.on_type(type(value), "__index__")
        return self.as_index(value) if is_kind(method, types.FunctionType) else value

    def native(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """C code that an operator comes to: not with a container from outside, of which nobody has read the items."""
        name = getattr(function, "__name__", "")
        for value in args:
            if issubclass(type(value), READ_BY_C) and self.objects.is_entered(value):
                kind = type(value).__name__
                raise Break("container read by an operator", f"a {kind} that the step did not make", "use its methods")
            if name in COPYING:
                self.calls.refuse_own_methods(type(value), name)
        if name in REPEATS and any(issubclass(type(v), SEQUENCES) for v in args):
            args = tuple(map(self.as_count, args))
        try:
            return function(*args, **kwargs)
        except torch_private.DATA_DEPENDENT:
            raise natives.decided_by_data() from None

    def compare(self, op: str, left: Any, right: Any) -> Any:
        left_kind, right_kind = type(left), type(right)
        if left_kind in SIMPLE and right_kind in SIMPLE:
            return COMPARISONS[op](left, right)
        if (symbolic := symbolic_side(left, right)) is not None:
            return symbolic.compare(op, left, right)
        if np.ndarray in (left_kind, right_kind):
            if (found := self.array_calls.operator(op, left, right)) is not ABSENT:
                return found
        if number_kind(left) in NUMPY_NUMBERS or number_kind(right) in NUMPY_NUMBERS:
            if type_of(left) in NOT_NUMBERS or type_of(right) in NOT_NUMBERS:
                return COMPARISONS[op](example(left), example(right))  # unequal, or Python's own error
            return self.numpy_binary(op, left, right)
        if left_kind is TensorProxy or right_kind is TensorProxy:
            return self.tensor_compare(op, left, right)
        if left_kind is Text or right_kind is Text:
            left, right = (natives.specialised(v, self.calls.known) for v in (left, right))
            return self.compare(op, left, right)
        if (answer := self.of_the_object(op, left, right)) is not ABSENT:
            return answer
        if left_kind is Number or right_kind is Number:
            sizes = (torch.SymInt, torch.SymFloat)
            if all(type(v) is Number or type(v) in (int, float, bool, *sizes) for v in (left, right)):
                return self.numbers.apply(numbers.OPERATIONS[op], left, right)
            if op in ("==", "!=") and all(type(v) is Number or type(v) in ATOMS for v in (left, right)):
                return op == "!="
        if torch.SymBool in (left_kind, right_kind):
            return self.compare(op, *(self.truth(v) if type(v) is torch.SymBool else v for v in (left, right)))
        if left_kind in SYMBOLIC or right_kind in SYMBOLIC or (left_kind in ATOMS and right_kind in ATOMS):
            if left_kind in SYMBOLIC or right_kind in SYMBOLIC:
                COMPARISONS[op](example(left), example(right))  # Python's own error, where there is one
                left, right = (int(v) if type(v) is bool else v for v in (left, right))
            return COMPARISONS[op](torch_sizes.rounded(left), torch_sizes.rounded(right))
        if issubclass(type(left), type) and issubclass(type(right), type) and op in ("==", "!="):
            if not any(self.compares_in_python(value, op) for value in (left, right)):  # their metaclasses have no say
                return (left is right) is (op == "==")
        if op in ("==", "!="):
            left, right = map(self.objects.seen_through, (left, right))
            left_kind, right_kind = type(left), type(right)
        self.refuse_alien(left)
        self.refuse_alien(right)
        if (
            op in ("==", "!=")
            and (left_kind in ATOMS or right_kind in ATOMS)
            and self.identity_compared(left)
            and self.identity_compared(right)
        ):
            return op == "!="
        if all(issubclass(kind, types.SimpleNamespace) for kind in (left_kind, right_kind)):
            if not any(self.compares_in_python(value, op) for value in (left, right)):
                return self.compare(op, *(self.get_attr(value, "__dict__") for value in (left, right)))
        for value in (left, right):
            self.guard_operators(value, ("__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__"))
        if left_kind in (tuple, list) and right_kind is left_kind:
            return self.compare_sequences(op, self.operand(left), self.operand(right))
        a, b = self.operand(left), self.operand(right)
        if self.compares_in_python(left, op) or self.compares_in_python(right, op):
            return super().compare(op, a, b)
        if type(a) in DICTS and type(b) in DICTS and op in ("==", "!="):
            return self.compare_dicts(a, b) is (op == "==")
        if any(k in CONTAINERS or k in natives.VIEWS for k in (type(a), type(b))):
            if not (natives.is_plain(a, self.calls.known) and natives.is_plain(b, self.calls.known)):
                if family_of(a) is not family_of(b) and op in ("==", "!="):
                    return op == "!="
                raise Break(
                    "comparison of containers",
                    f"{left_kind.__name__} {op} {right_kind.__name__} with items that are not plain",
                    "compare plain values",
                )
        if op in ("==", "!="):
            self.guard_identities(left, right)
        return super().compare(op, a, b)

    def guard_identities(self, left: Any, right: Any) -> None:
        """Two objects that C compares, by identity or by what they are bound to, go on being two."""
        if issubclass(type(left), types.MethodType) and issubclass(type(right), types.MethodType):
            self.guard_identities(left.__self__, right.__self__)
            self.guard_identities(left.__func__, right.__func__)
        elif left is not right:
            self.objects.guard_distinct(left, right)

    def asks_in_python(self, value: Any) -> bool:
        """Whether torch asks the value for an answer of its own, or looking for one runs code of the value's class."""
        methods = (self.attributes.on_type(type(value), name) for name in ("__getattr__", "__getattribute__"))
        asks = any(is_kind(method, types.FunctionType) for method in methods)
        return asks or self.attributes.on_type(type(value), "__torch_function__") is not ABSENT

    def compares_in_python(self, value: Any, op: str) -> bool:
        """Whether the value's class may answer `op`, from either side, with a method in Python."""
        names = ("__eq__", "__ne__") if op in ("==", "!=") else ("__lt__", "__gt__", "__le__", "__ge__")
        self.attributes.rely_on(type(value), *names)
        return any(special(type(value), name) is not None for name in names)

    def identity_compared(self, value: Any) -> bool:
        """Whether ``==`` on the value is identity or the plain meaning of an atom."""
        kind = type(value)
        if kind in ATOMS:
            return True
        self.attributes.rely_on(kind, "__eq__", "__ne__")
        return kind.__eq__ is object.__eq__ and kind.__ne__ is object.__ne__

    def compare_sequences(self, op: str, left: Any, right: Any) -> Any:
        """As the first items that differ say, or where none do the lengths (list_richcompare in listobject.c)."""
        if op in ("==", "!=") and len(left) != len(right):
            return op == "!="
        for a, b in zip(left, right, strict=False):
            if not self.is_or_equals(a, b):
                return op == "!=" if op in ("==", "!=") else self.compare(op, a, b)
        return COMPARISONS[op](len(left), len(right))

    def compare_dicts(self, left: dict[Any, Any], right: dict[Any, Any]) -> bool:
        """``==`` of two dicts (dict_equal in Objects/dictobject.c); two ordered ones have the same order, too."""
        if not all(natives.is_plain(key, self.calls.known) for key in (*left, *right)):
            raise Break("comparison of containers", "dicts with keys that are not plain", "compare plain values")
        if left.keys() != right.keys():
            return False
        if all(is_kind(one, collections.OrderedDict) for one in (left, right)) and list(left) != list(right):
            return False
        pairs = [(right[key], value) for key, value in left.items()]
        return all(self.is_or_equals(b, a) for b, a in pairs)

    def tensor_compare(self, op: str, left: Any, right: Any) -> Any:
        sides = [left, right]
        for i, value in enumerate(sides):
            if (
                issubclass(type(value), TensorProxy | Number)
                or type(value) in SIMPLE
                or type(value) in SYMBOLIC
                or type(value) is complex
            ):
                continue
            if self.asks_in_python(value):
                raise Break(
                    "comparison between a tensor and an object",
                    f"torch asks a {type(value).__name__} for __torch_function__, which its class answers itself",
                    "convert the object first",
                )
            is_number = issubclass(type(value), int | float | complex)  # which a tensor compares itself with
            if self.compares_in_python(value, op) and not (is_number and value is right):
                # a tensor answers NotImplemented, before it or after it
                forward, reflected = COMPARE_DUNDERS[op]
                result = self.rich_compare(value, sides[1 - i], reflected if i else forward)
                if result is not NotImplemented:
                    return result
            sides[i] = plain_member(value)
            if is_number and type(sides[i]) in SIMPLE:
                continue
            if op in ("==", "!=") and not is_number and not issubclass(type(value), np.ndarray | np.generic):
                return op == "!="  # (those of numpy's compare items)
            raise Break(
                "comparison between a tensor and an object",
                f"tensor {op} {type(value).__name__}",
                "convert the object first",
            )
        return self.tensors.function(COMPARISONS[op], tuple(sides), {})

    def is_same(self, left: Any, right: Any) -> bool:
        kinds = type(left), type(right)
        if UndefinedAfterLoop in kinds:
            self.refuse_alien(left if kinds[0] is UndefinedAfterLoop else right)
        if all(issubclass(kind, View | OpaqueTensor) for kind in kinds):
            left.refuse("the identity")
        if Varying in kinds and type_of(left) is type_of(right):
            (left if kinds[0] is Varying else right).refuse("the identity")
        if all(issubclass(kind, tuple) for kind in kinds):
            self.objects.guard_tuples(left, right)
        if left is not right and (kinds[0] in OPEN_NUMBERS or kinds[1] in OPEN_NUMBERS):
            examples = [type(example(v)) for v in (left, right)]
            if examples == [bool, bool]:
                return self.truth(left) is self.truth(right)
            if examples[0] is examples[1]:
                raise Break("identity of a number", f"`is` of two {examples[0].__name__}s", "compare with ==")
        return self.is_one(left, right)

    def is_one(self, left: Any, right: Any) -> bool:
        """``is``, where it is only the first part of ``==``."""
        if left is not right and not self.objects.is_one_tuple(left, right):
            refuse_one_or_two(left, right, self.objects.outcomes)
            self.objects.guard_distinct(left, right)
            return False
        return True

    def is_or_equals(self, left: Any, right: Any) -> bool:
        """``left is right or left == right``, which containers ask of their items (PyObject_RichCompareBool)."""
        if self.is_one(left, right) or self.truth(self.compare("==", left, right)):
            return True
        floats = all(v.known if type(v) is Number else type(v) in (float, complex) for v in (left, right))
        if floats and self.truth(self.compare("!=", left, left)) and self.truth(self.compare("!=", right, right)):
            detail = "a nan is an item of containers, which find it if it is the same object"
            raise Break("identity of a number", detail, "ask math.isnan()")
        return False

    def is_none(self, value: Any) -> bool:
        if issubclass(type(value), UndefinedAfterLoop):
            self.refuse_alien(value)
        return value is None

    def truth(self, value: Any) -> bool:
        kind = type(value)
        if kind in SIMPLE:
            return bool(value)
        if kind is TensorProxy:
            if value.fake.dim() and is_kind(n := value.fake.numel(), int) and n > 1:
                raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
            if (known := constant_truth(value.node)) is not None:
                return known
            if (known := self.tensors.speculate(value)) is not None:
                return known
            raise Break(
                "data-dependent branch",
                f"Python branches on a tensor {value.describe()}",
                "use torch.where, or move the branch out of the captured step",
            )
        if kind in SYMBOLIC:
            return self.tensors.symbolic_truth(value)
        if kind is Number:
            return self.numbers.truth(value)
        if issubclass(type(value), SymbolicObject):
            return value.truth()
        if kind is Text:
            return bool(natives.specialised(value))
        if kind in ATOMS or kind in TRUE or issubclass(kind, natives.VIEWS):
            return bool(value)
        self.refuse_alien(value)
        if is_kind(method := self.attributes.on_type(kind, "__bool__"), types.FunctionType):
            result = self.call(method, [value], {})
            if type_of(result) is not bool:
                raise TypeError(f"__bool__ should return bool, returned {type_name(type_of(result))}")
            return self.truth(result)
        if method is not ABSENT:
            if plain_member(value) is not value:
                return bool(plain_member(value))
            raise Break("truth of a C object", kind.__name__, "test it outside of the step")
        length = self.attributes.on_type(kind, "__len__")
        if length is ABSENT:
            return True
        return self.truth(self.compare("!=", self.calls.length(value), 0))

    def refuse_alien(self, value: Any) -> None:
        if issubclass(type(value), (UndefinedAfterLoop, TensorMethod, SymbolicObject, *ROWS)):
            if issubclass(type(value), UndefinedAfterLoop):
                self.attributes.get(value, "value")
            raise Break("tensor machinery used as a value", type_of(value).__name__, "call it, or iterate over it")

    def value_in_c(self, value: Any) -> bool:
        """Whether the object existed before the step and holds, in C, a value that no guard of ours reads."""
        record, kind = self.objects.record_of(value), type(value)
        if record is None or derived_from(kind, (*CONTAINERS, tuple)) is not None:
            return False
        if issubclass(type(value), (*IDENTITIES, types.MethodType, frozenset)) or identified(value):
            return False
        may_change = kind.__hash__ is None or kind in (types.MappingProxyType, memoryview)  # (bytearray, ndarray)
        return may_change or not record.source.static

    def guard_operators(self, value: Any, names: Any) -> None:
        kind, names = type(value), tuple(names)
        if self.value_in_c(value) and any(defined_in_c(kind, name) for name in names):
            raise Break(
                "operator of a C object",
                f"a {kind.__module__}.{kind.__qualname__} that existed before the step takes part in arithmetic",
                "convert it to a plain number before the step: int(x), float(x)",
            )
        self.attributes.rely_on(kind, *names)


def symbolic_side(left: Any, right: Any) -> SymbolicObject | None:
    """That of two operands which stands for something else, the left one first."""
    return next((side for side in (left, right) if issubclass(type(side), SymbolicObject)), None)


def family_of(value: Any) -> type:
    """The type that the value is compared as: containers of two families are never equal."""
    families = (dict, list, tuple, collections.deque, Set)
    return next((family for family in families if issubclass(type(value), family)), type(value))


def defined_in_c(kind: type, name: str) -> bool:
    """Whether a type has the special method from C code, other than object's own."""
    found = lookup(kind, name)
    return is_kind(found, types.WrapperDescriptorType) and found.__objclass__ is not object
