"""``__torch_function__``: what a class of the user's answers in the place of an operator.

torch decides whom it asks, in which order and with what: the operator is called with stand-ins that have nothing but
that method, and what torch gives the first of them is what the user's method is called with, in the trace.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind

from ..hook import ABSENT
from ..tensors.fakes import fake_of
from ..values.numbers import Number, is_open
from ..values.values import ATOMS, Break, TensorProxy, replaced, type_of
from .parts import CallParts

NAME = "__torch_function__"
HINT = "call the operator with tensors and plain values"


class Asked(Exception):
    """torch asks a stand-in of the class `kind`: `given` are the arguments of its ``__torch_function__``."""

    def __init__(self, kind: type, given: tuple):
        self.kind, self.given = kind, given


class Overrides:
    """What classes of Python code answer for operators in one trace."""

    def __init__(self, calls: CallParts):
        self.calls, self.attributes, self.made = calls, calls.attributes, calls.objects.made
        self.world = calls.tensors.world

    def among(self, values: Any) -> list[Any]:
        """The objects that torch may ask: among arguments, and among the items of lists and tuples in them."""
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in ATOMS or kind is TensorProxy:
                continue
            if kind in (list, tuple):
                found += self.among(value)
            elif not is_library(kind) and self.attributes.on_type(kind, NAME) is not ABSENT:
                found.append(value)
        return found

    def answer(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the first object that torch asks answers for ``function(*args, **kwargs)``; ABSENT if there is none."""
        objects = self.among((*args, *kwargs.values()))
        if not objects:
            return ABSENT
        if is_open((list(args), list(kwargs.values()))):
            raise Break("__torch_function__", "beside a number that only the running step knows", HINT)
        stand_ins = self.stand_ins(objects)
        given = replaced((args, kwargs), {id(one): stand_ins[type(one)]() for one in objects})
        fakes = fake_of(given)
        originals = {id(fake): real for fake, real in pairs(fakes, (args, kwargs))}
        originals |= {id(stand_in): kind for kind, stand_in in stand_ins.items()}
        try:
            self.world.call(function, *fakes)
        except Asked as asked:
            operator, kinds, *rest = replaced(asked.given, originals)
            if is_kind(function, types.FunctionType) and operator is not function:
                what = f"{asked.kind.__name__} answers for an operator within {function.__name__}"
                raise Break("__torch_function__", what, HINT) from None
            if is_kind(operator, types.FunctionType):
                operator = self.calls.substitute(operator)
            method = self.attributes.get(asked.kind, NAME)
            result = self.calls.call(method, [operator, kinds, *map(self.made, rest)], {})
            if result is NotImplemented:
                what = f"{asked.kind.__name__} leaves the operator to the next argument"
                raise Break("__torch_function__", what, HINT) from None
            return result
        except Exception:
            pass
        raise Break("__torch_function__", f"torch asks no {type(objects[0]).__name__} for this operator", HINT)

    def are_asked(self, values: Any) -> bool:
        """torch's ``has_torch_function``: no, where all are tensors of torch's own or have no part in it."""
        for value in self.calls.fast(values):
            kind = type_of(value)
            plain = type(value) is TensorProxy or type(value) in ATOMS or is_kind(value, Number)
            if not plain and self.attributes.on_type(kind, NAME) is not ABSENT:
                break
        else:
            return False
        raise Break("__torch_function__", "torch asks objects that may have one", HINT)

    def stand_ins(self, objects: list[Any]) -> dict[type, type]:
        """For each class a class that derives from the others' as it does: torch asks the most derived first."""
        made: dict[type, type] = {}
        for kind in sorted({type(one) for one in objects}, key=lambda kind: len(kind.__mro__)):
            method = self.attributes.on_type(kind, NAME)
            if not is_kind(method, classmethod) or not is_kind(method.__func__, types.FunctionType):
                what = f"that of {kind.__name__} is not a class method"
                raise Break("__torch_function__", what, "make it one, of Python code")
            bases = [stand_in for base, stand_in in made.items() if issubclass(kind, base)]
            bases = [base for base in bases if not any(base is not one and issubclass(one, base) for one in bases)]

            def ask(_: type, *given: Any, kind: type = kind) -> Any:
                raise Asked(kind, given)

            made[kind] = type(kind.__name__, (*bases,), {NAME: classmethod(ask)})
        return made


def is_library(kind: type) -> bool:
    """Whether the class is Python's own or torch's: those that answer for operators are tensors."""
    return kind.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "moebius")


def pairs(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """The leaves that differ in two structures of one shape."""
    if type(ours) in (list, tuple):
        return [pair for one, other in zip(ours, theirs, strict=True) for pair in pairs(one, other)]
    if type(ours) is dict:
        return [pair for key, one in ours.items() for pair in pairs(one, theirs[key])]
    return [(ours, theirs)] if ours is not theirs else []
