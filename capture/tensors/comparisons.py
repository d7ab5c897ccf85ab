"""Questions to whole tensors that Python gets as True or False: as the operators that torch makes its answer of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.values import TensorProxy
from .interfaces import TensorOperators

PAIRS: dict[Any, Any] = {torch.allclose: torch.isclose, torch.equal: torch.eq}
QUESTIONS: dict[str, Any] = {"equal": torch.equal, "allclose": torch.allclose, "is_nonzero": torch.is_nonzero}


def asked(tensors: TensorOperators, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """``torch.equal``, ``torch.allclose`` and ``torch.is_nonzero`` as a yes or no of the graph; None where they are to
    be a graph break."""
    operands = args[: 2 if function in PAIRS else 1]
    if not tensors.whole_step or not all(is_kind(o, TensorProxy) and is_plain(o.fake) for o in operands):
        return None
    if function is torch.is_nonzero:
        if len(args) != 1 or kwargs or operands[0].fake.numel() != 1:
            return None
        return tensors.method(tensors.function(torch.ne, (operands[0], 0), {}), "item", (), {})
    if len(operands) != 2 or (function is torch.equal and (len(args) != 2 or kwargs)):
        return None
    one, other = (o.fake for o in operands)
    if one.dtype is not other.dtype or one.device != other.device:
        return None
    if function is torch.equal and not same_shape(one, other):
        return False
    each = tensors.function(PAIRS[function], args, kwargs)
    return tensors.method(tensors.function(torch.all, (each,), {}), "item", (), {})


def is_plain(fake: torch.Tensor) -> bool:
    """Whether its shape is known, so that operators take it as any other."""
    return fake.layout is torch.strided and not torch_private.depends_on_values(fake)


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dim() == other.dim() and all(map(operator.eq, one.shape, other.shape))
