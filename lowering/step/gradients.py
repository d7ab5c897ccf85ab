"""Nodes that read and write ``.grad``, or give a tensor other data, in the middle of a graph."""

from __future__ import annotations

import torch
from torch import fx

from moebius.lowering.errors import LoweringError


class MissingGradientError(LoweringError):
    """Backward left a parameter without a gradient that it had when the step was captured.

    given: what ``torch.autograd.grad`` gave instead; None after ``backward()``.
    """

    def __init__(self, text: str, given: tuple[torch.Tensor | None, ...] | None = None):
        super().__init__(text)
        self.given = given


def require_gradients(*tensors: torch.Tensor) -> None:
    """Right after a backward: each of the tensors, whose gradients the rest of the graph reads, has one.

    A batch may leave a module out (an expert that no token chose): then Python goes on from here. Raises
    MissingGradientError, which capture answers.
    """
    missing = sum(tensor.grad is None for tensor in tensors)
    if missing:
        raise MissingGradientError(
            f"{missing} of {len(tensors)} parameters got no gradient in this step, and the step was captured with one; "
            "capture the loss alone and leave backward and the optimizer outside"
        )


class ReachedElsewhereError(MissingGradientError):
    """Backward on another rank has reached a parameter that none had reached before."""


class Elsewhere:
    """What the last backward that ranks have averaged found. news: whether ranks reached different parameters, some for
    the first time: graphs that were captured before do not have their gradients."""

    news = False


def require_known() -> None:
    """Right after a backward whose gradients ranks average. Raises ReachedElsewhereError, on all of them."""
    if Elsewhere.news:
        Elsewhere.news = False
        raise ReachedElsewhereError("backward on another rank reached parameters that no backward had reached before")


def keep(*values: object) -> None:
    """Nothing: after ``require_gradients``, holds what Python would go on with where one is missing."""


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.grad`` after a backward that is known to reach the tensor: same shape, dtype and device as the tensor.

    Raises MissingGradientError where there is none: the rest of the graph was captured with it.
    """
    gradient = tensor.grad
    if gradient is None:
        raise MissingGradientError(
            f"a parameter of shape {tuple(tensor.shape)} got no gradient in this step, and the step was captured with "
            "one; capture the loss alone and leave backward and the optimizer outside, or use backend='eager' to see "
            "which module such a batch leaves out"
        )
    return gradient


def require_given(gradients: tuple[torch.Tensor | None, ...], expected: tuple[bool, ...]) -> None:
    """What ``torch.autograd.grad(..., allow_unused=True)`` gave is None exactly where it was while tracing.

    Loops over experts have other iterations in each call. Raises MissingGradientError, which capture answers.
    """
    if tuple(gradient is not None for gradient in gradients) != expected:
        raise MissingGradientError("autograd.grad reaches other tensors than when the step was captured", gradients)


def set_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """``tensor.grad = gradient``, in its place among the graph's nodes."""
    tensor.grad = gradient


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, in its place among the graph's nodes: from then on the two share storage."""
    tensor.data = data


set_data.writes = (0,)  # type: ignore[attr-defined]  # the argument that is another one from then on (aliasing.py asks)


fx.wrap("gradient_of")
fx.wrap("require_gradients")
fx.wrap("keep")
fx.wrap("require_known")
fx.wrap("require_given")
fx.wrap("set_gradient")
fx.wrap("set_data")
