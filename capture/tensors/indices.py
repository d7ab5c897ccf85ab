"""Indices of tensors that hold numbers which only the running step knows."""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import TensorProxy
from .fakes import fake_of

OPEN_INDICES = (torch.SymInt, Number)
INDICES = (*OPEN_INDICES, int, slice, type(...))


def is_scalar_index(key: Any) -> bool:
    """A 0-dim integer tensor used as an index: torch reads its value and selects."""
    return (
        is_kind(key, TensorProxy)
        and key.fake.dim() == 0
        and not key.fake.dtype.is_floating_point
        and key.fake.dtype is not torch.bool
        and key.fake.dtype is not torch.uint8
    )


def holds_scalar_index(key: Any) -> bool:
    """Whether an index is one, or has one in it."""
    return any(map(is_scalar_index, key)) if is_kind(key, tuple) else is_scalar_index(key)


def selections(key: Any, dims: int) -> list[tuple[int, Any]] | None:
    """An index of numbers and slices, with a number that varies, as what is taken of which axis, the last one first:
    torch's own index would make a constant of the number. None: no such index."""
    keys = list(key) if is_kind(key, tuple) else [key]
    if not any(type(k) in OPEN_INDICES for k in keys) or not all(type(k) in INDICES for k in keys):
        return None
    if (places := [i for i, k in enumerate(keys) if k is ...]) and len(places) == 1:
        keys[places[0] : places[0] + 1] = [slice(None)] * (dims - len(keys) + 1)
    if len(keys) > dims or any(k is ... for k in keys):
        return None
    return [(axis, one) for axis, one in enumerate(keys)][::-1]


def selected(fake: torch.Tensor, steps: list[tuple[int, Any]]) -> torch.Tensor:
    """What an index takes. A number that is no size (0 or 1 today) selects: what any position gives stands for it."""
    for axis, one in steps:
        one = 0 if is_kind(one, Number) and one.kind is int else fake_of(one)
        fake = fake[(*(slice(None),) * axis, one)] if is_kind(one, slice) else fake.select(axis, one)
    return fake


def holds_unknown_number(key: Any) -> bool:
    """An index with a number in it that only the running loop knows; torch would want to know its sign."""
    keys = key if is_kind(key, tuple) else (key,)
    return any(is_kind(k, torch.SymInt) and torch_private.depends_on_values(k) for k in keys)


def any_position(key: Any) -> Any:
    """The index with 0 in the places of such numbers and of those that a tensor holds: shape and strides are those of
    any position."""
    if is_kind(key, tuple):
        return tuple(any_position(k) for k in key)
    return 0 if type(key) in OPEN_INDICES or is_scalar_index(key) else key
