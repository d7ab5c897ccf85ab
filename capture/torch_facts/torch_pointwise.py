"""Fake operators on rows of unknown number: torch is asked once for each kind of them.

An expert's rows are as many as the data says. torch's cache of fake operators finds nothing where sizes are symbols
that are new each time, and torch computes such a result in Python: half a millisecond for a product of two tensors, of
which a loop over experts has thousands.

Contract
    Asked of:   an operator that torch itself calls element by element, and conversions of dtype.
    Takes:      dense tensors, of which only the first size is a symbol. One has the result's sizes; the others have the
                same ones, or 1, or none, at each place from the right. Numbers beside them.
    Gives:      what torch's fake operator gave for operands of the same dtypes, devices, places of size 1 and kinds of
                numbers, with these sizes. Only what once looked like the first operand is repeated; anything else is
                torch's to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy import functions

from .torch_private import depends_on_values, expression

CONVERSIONS = {"aten::_to_copy"}
OPTIONS = (bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class PointwiseOnRows:
    """The results of such operators, for one capture."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.dtypes: dict[Hashable, torch.dtype | None] = {}  # kind -> its result's; None: it looks otherwise

    def result(self, torchs: Callable[[Any], Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator gives that has symbols among its arguments. torchs: asks torch, of these
        positional ones."""
        if not is_pointwise(func):
            return torchs(args)
        args = self.spread(args)
        like = broadest([each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)])
        kind = kind_of(func, args, kwargs) if like is not None else None
        if like is None or kind is None:
            return torchs(args)
        if (dtype := self.dtypes.get(kind)) is not None:
            meta = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
            return FakeTensor(self.mode, meta, like.device)
        found = torchs(args)
        if kind not in self.dtypes:
            self.dtypes[kind] = found.dtype if looks_like(found, like) else None
        return found

    def spread(self, args: Sequence[Any]) -> Sequence[Any]:
        """Rows of unknown number that meet a known number of them are as many, or one that is spread over these; and so
        is the first of some rows that meets them. The result has the number of those; of the unknown one nothing is
        said. (torch would take it that they are as many wherever they are counted.)"""
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if len(tensors) < 2:
            return args
        return [self.as_many(each, tensors) if isinstance(each, torch.Tensor) else each for each in args]

    def as_many(self, rows: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        if not has_rows(rows) or not depends_on_values(rows.shape[0]):
            return rows
        beside = (other.shape[-rows.dim()] for other in others if other.dim() >= rows.dim())
        number = next((size for size in beside if is_several(size) or is_first_of(rows.shape[0], size)), None)
        if number is None:
            return rows
        meta = torch.empty_strided((number, *rows.shape[1:]), rows.stride(), dtype=rows.dtype, device="meta")
        return FakeTensor(self.mode, meta, rows.device)


def is_several(size: Any) -> bool:
    """Whether a size is certainly known, and not 1."""
    if type(size) is int:
        return size != 1
    return not depends_on_values(size) and size.node.shape_env.bound_sympy(size.node.expr).lower > 1


def is_first_of(size: Any, whole: Any) -> bool:
    """Whether a size is that of ``rows[:1]``, of so many rows: there is one, or none where these are none."""
    least = size.node.expr
    return isinstance(least, functions.Min) and set(least.args) == {1, expression(whole)}


def looks_like(found: Any, like: torch.Tensor) -> bool:
    plain = type(found) is FakeTensor and found.layout is torch.strided and found.device == like.device
    return plain and sizes(found) == sizes(like) and found.stride() == like.stride()


def is_pointwise(func: Any) -> bool:
    """Whether an operator is a function of each element alone that makes one new tensor."""
    known = POINTWISE.get(func)
    if known is None:
        schema: Any = getattr(func, "_schema", None)  # (an operator of higher order has none)
        one = schema is not None and len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        tagged = one and (schema.name in CONVERSIONS or torch.Tag.pointwise in func.tags)
        new = one and not any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
        known = POINTWISE[func] = tagged and new
    return known


POINTWISE: dict[Any, bool] = {}


def sizes(tensor: torch.Tensor) -> list[Any]:
    """Symbols as their expressions: whether two are equal is not asked, which would be an assumption."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape]


def broadest(operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The operand that has the sizes of a result, where all are dense and meet in it."""
    if not all(map(is_dense, operands)):
        return None
    like = max(operands, key=lambda each: (each.dim(), isinstance(each.shape[0], torch.SymInt)), default=None)
    if like is None or not isinstance(like.shape[0], torch.SymInt):
        return None
    whole = sizes(like)
    for each in operands:
        pairs = zip(reversed(sizes(each)), reversed(whole), strict=False)
        if any(size not in (1, in_all) for size, in_all in pairs):
            return None
    return like


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its rows follow each other, of which no size is a symbol or 0."""
    if not is_plain(tensor):
        return False
    dense = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()), strict=False):
        if type(size) is not int or type(stride) is not int or size == 0 or stride != dense:
            return False
        dense *= size
    first, stride = tensor.shape[0], tensor.stride(0)
    return type(stride) is int and stride == dense and (isinstance(first, torch.SymInt) or first > 0)


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether its rows follow each other, maybe with gaps, and nothing but their number is a symbol."""
    known = is_plain(tensor) and all(type(each) is int for each in (*tensor.shape[1:], *tensor.stride()))
    return known and [*tensor.stride()] == sorted(tensor.stride(), reverse=True)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has axes (the dtype of one without counts less than that of a number), and its memory its values."""
    strided = type(tensor) is FakeTensor and tensor.layout is torch.strided and tensor.dim() > 0
    return strided and not (tensor.is_conj() or tensor.is_neg())


def kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What the result's dtype and layout depend on: the operands' dtypes, devices and places of size 1, the types of
    numbers, and all other options."""
    kind: list[Hashable] = [func]
    for name, value in (*enumerate(args), *kwargs.items()):
        if type(value) is FakeTensor:
            ones = tuple(type(size) is int and size == 1 for size in value.shape)
            kind.append((name, value.dtype, value.device, ones))
        elif isinstance(value, SYMBOLS) or type(value) in (int, float, complex):
            kind.append((name, type(value)))
        elif value is None or isinstance(value, OPTIONS):
            kind.append((name, type(value), value))
        else:
            return None
    return tuple(kind)
