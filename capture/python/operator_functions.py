"""The functions of the ``operator`` module: each does what its operator does, in place where the operator is."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.operators import COMPARISONS, OPERATIONS, UNARIES

from ..values.numbers import Number
from ..values.values import Break, TensorProxy, type_of
from .parts import Parts


def functions_over(domain: Parts) -> dict[Any, Callable[..., Any]]:
    """What stands in for each function while ``domain`` traces."""
    meaning: dict[Any, tuple[int, Callable[..., Any]]] = {
        operator.getitem: (2, domain.get_item),
        operator.setitem: (3, domain.set_item),
        operator.delitem: (2, domain.del_item),
        operator.contains: (2, lambda container, item: domain.contains(item, container)),
        operator.is_: (2, domain.is_same),
        operator.is_not: (2, lambda left, right: not domain.is_same(left, right)),
        operator.truth: (1, domain.truth),
        operator.not_: (1, functools.partial(domain.unary, "not")),
    }
    meaning |= {function: (2, functools.partial(domain.binary, op)) for op, function in OPERATIONS.items()}
    meaning |= {function: (2, functools.partial(domain.compare, op)) for op, function in COMPARISONS.items()}
    meaning |= {function: (1, functools.partial(domain.unary, op)) for op, (function, _) in UNARIES.items()}
    meaning[operator.index] = (1, functools.partial(index_of, domain))
    meaning[operator.concat] = (2, functools.partial(sequences_joined, domain))
    functions = {function: functools.partial(applied, function, *how) for function, how in meaning.items()}
    return functions | {operator.call: lambda function, *args, **kwargs: domain.call(function, [*args], kwargs)}


def applied(function: Callable[..., Any], count: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With another number of arguments, or with names for them, the function raises Python's own error."""
    return method(*args) if len(args) == count and not kwargs else function(*args, **kwargs)


def index_of(domain: Parts, value: Any) -> Any:
    """``operator.index``: of an int it is the int."""
    whole = is_kind(value, torch.SymInt) or (type(value) is Number and value.kind is int)
    return value if whole else domain.calls.native(operator.index, [value], {})


def sequences_joined(domain: Parts, left: Any, right: Any) -> Any:
    """``concat``: ``+`` of sequences, which tensors and numbers are not (PySequence_Concat, Objects/abstract.c)."""
    if issubclass(type(left), TensorProxy):
        raise TypeError("'Tensor' object can't be concatenated")
    if type(left) in (list, tuple, str) and type(left) is type(right):
        return domain.binary("+", left, right)
    raise Break("sequences joined by C", f"operator.concat() of a {type_of(left).__name__}", "use +")
