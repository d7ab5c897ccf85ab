"""``ctc_loss`` on fakes: torch asks for the numbers in tensors of lengths, of which the loss has no part of its shape.

What a fake stands for here is the loss and its way back to ``log_probs``; the graph holds torch's operator.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from moebius.interpreter import is_kind

from .windows import Pooled

CTC_LOSSES = frozenset({torch.ctc_loss, torch.nn.functional.ctc_loss})
ONE_EACH = ("none", 0)  # how reductions are named in Python, and in C
REDUCTIONS = ("mean", "sum", 1, 2, *ONE_EACH)
WHOLE = (torch.int32, torch.int64)


class Alignment(Pooled):
    """One loss for each sequence; backward gives a contiguous gradient, as torch's does (LossCTC.cpp)."""


def like_ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The loss, from fakes."""
    losses: torch.Tensor = Alignment.apply(log_probs, log_probs.shape[1:-1])
    return losses if reduction in ONE_EACH else losses.mean()


SIGNATURE = inspect.signature(like_ctc_loss)


def has_open_lengths(*args: Any, **kwargs: Any) -> bool:
    """Whether the lengths are tensors, and nothing else could make torch's operator fail but their numbers."""
    try:
        bound = SIGNATURE.bind(*args, **kwargs)
    except TypeError:  # torch's own says what does not fit
        return False
    bound.apply_defaults()
    *tensors, blank, reduction, zero_infinity = bound.arguments.values()
    if type(blank) is not int or reduction not in REDUCTIONS or type(zero_infinity) is not bool:
        return False
    fakes: list[Any] = [getattr(one, "fake", None) for one in tensors]
    if not all(is_kind(fake, torch.Tensor) and fake.device.type == "cpu" for fake in fakes):
        return False
    scores, labels, *lengths = fakes
    batched = scores.dim() == 3 and scores.dtype in (torch.float32, torch.float64) and labels.dtype in WHOLE
    return batched and labels.dim() in (1, 2) and all(one.dim() == 1 and one.dtype in WHOLE for one in lengths)
