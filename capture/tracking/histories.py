"""What the data decides of a tensor: a loop without turns, or a branch that is not taken, leaves the one that there
was, with its history. The fakes have both histories; who asks whether there is any must know which is certain. So must
who asks which tensor it is.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch

from .values import Break, TensorProxy


class CarriedOn(torch.autograd.Function):
    """The fake of a carried value after the loop: the value before in shape, of its history and that of a turn."""

    @staticmethod
    def forward(_: Any, before: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        return before.clone()


def carried_on(before: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """``before``, or what a turn made of it."""
    return cast(torch.Tensor, CarriedOn.apply(before, turn))


def is_certain(fake: torch.Tensor) -> bool:
    """Whether ``requires_grad`` of a fake is that of its tensor, whatever turns ran."""
    pending, seen, doubtful = [fake.grad_fn], set(), False
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return True
        edges = [edge for edge, _ in node.next_functions]
        if getattr(type(node), "_forward_cls", None) is CarriedOn:
            doubtful = True
            edges = edges[:1]  # the value before
        pending += edges
    return not doubtful


def refuse_doubt(fake: torch.Tensor, name: str) -> None:
    """Break where ``tensor.requires_grad`` or ``is_leaf`` is asked of such a tensor."""
    if not is_certain(fake):
        detail = "whether its value needs a gradient depends on the data, in a loop or branch before"
        raise Break(f"Tensor.{name}", detail, "ask the model's output or parameters instead")


def tensors_of(value: Any, outcomes: dict[Any, tuple[Any, ...]]) -> set[Any]:
    """The tensors that one may be behind loops and branches."""
    found, pending = set(), [value]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += outcomes.get(one, ())
    return found


def refuse_one_or_two(left: Any, right: Any, outcomes: dict[Any, tuple[Any, ...]]) -> None:
    """Break where the data decides whether two tensors are one."""
    if not outcomes or not (isinstance(left, TensorProxy) and isinstance(right, TensorProxy)):
        return
    if tensors_of(left, outcomes) & tensors_of(right, outcomes):
        refuse_identity()


def refuse_outcome(key: Any, outcomes: dict[Any, tuple[Any, ...]]) -> None:
    """Break for a key of which the data decides which tensor it is."""
    if key in outcomes:
        refuse_identity()


def refuse_identity() -> NoReturn:
    detail = "which tensor it is depends on the data, behind a loop or branch"
    raise Break("identity of a tensor", detail, "use torch.where, or ask before it")
