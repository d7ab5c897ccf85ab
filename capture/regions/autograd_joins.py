"""What the data decides of a tensor: a loop without iterations, or a branch that is not taken, leaves the one that
there was, with its history. The fakes have both histories; who asks whether there is any must know which is certain. So
must who asks which tensor it is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import torch

from moebius.interpreter import is_kind

from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private
from ..values.values import Break, TensorProxy

WITHOUT = "moebius: the history without the iteration"


class CarriedOn(torch.autograd.Function):
    """The fake of a carried value after the loop: like one in shape, of the history of the value before and that of an
    iteration."""

    @staticmethod
    def forward(_: Any, like: torch.Tensor, before: torch.Tensor, iteration: torch.Tensor) -> torch.Tensor:
        return like.clone()


def carried_on(before: torch.Tensor, iteration: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """``before``, or what an iteration made of it. like: in shape, if not like ``before``."""
    with torch.enable_grad():  # (also what no_grad is around has the history that it had)
        like = before.detach() if like is None else like
        return cast(torch.Tensor, CarriedOn.apply(like, before, iteration))


def found_by_iteration(before: torch.Tensor) -> torch.Tensor:
    """The fake of a carried value in an iteration: ``before`` in shape and history."""
    with torch.set_grad_enabled(before.requires_grad):
        return before.clone()


class Writes:
    """An operator runs in an iteration: what it writes into, of tensors that existed before, has another history only
    if that iteration ran. ``WITHOUT`` in a history's metadata is the one before the write."""

    def __init__(self, fakes: Any, scope: GraphScope, known: dict[int, TensorProxy]):
        self.before: list[tuple[torch.Tensor, Any]] = []
        self.scope = scope
        if scope.parent is None:
            return
        for fake in torch_private.tree_leaves(fakes):
            if not is_kind(fake, torch.Tensor) or fake.is_inference():
                continue
            if (proxy := known.get(id(fake))) is None or proxy.node.graph is not scope.graph:
                self.before += [(one, one.grad_fn) for one in (fake, fake._base) if one is not None]

    def note(self) -> None:
        for fake, history in self.before:
            now: Any = fake.grad_fn
            if now is not history:
                self.scope.note("rewritten")
                if now is not None:
                    now.metadata[WITHOUT] = history


class Certainty(enum.Enum):
    """Of a fake's history: whether it leads to a tensor that requires gradients."""

    YES, NO, DOUBT = range(3)


def is_certain(fake: torch.Tensor, known: dict[Any, Certainty]) -> bool:
    """Whether ``requires_grad`` of a fake is that of its tensor, whatever iterations ran. known: the answers of a
    trace."""
    yes, no, doubt = Certainty
    known[None] = no
    pending: list[Any] = [fake.grad_fn]
    while pending:
        node = pending[-1]
        if node in known:
            pending.pop()
            continue
        joined = getattr(type(node), "_forward_cls", None) is CarriedOn
        carried = joined or WITHOUT in node.metadata
        edges = [edge for edge, _ in node.next_functions[joined:]]  # (``like`` has no history)
        if WITHOUT in node.metadata:
            edges = [node.metadata[WITHOUT]]
        found = [known.get(edge) for edge in edges]
        # a carried value has the history before or that of an iteration, so all must reach a leaf; else one is enough
        if hasattr(node, "variable"):
            known[node] = yes
        elif carried and (no in found or doubt in found):
            known[node] = doubt
        elif not carried and yes in found:
            known[node] = yes
        elif None in found:
            pending.append(edges[found.index(None)])
        else:
            known[node] = yes if carried else doubt if doubt in found else no
    return known[fake.grad_fn] is not doubt


def refuse_doubt(fake: torch.Tensor, name: str, scope: GraphScope) -> None:
    """Break where ``tensor.requires_grad``, ``is_leaf`` or what follows from them is asked of such a tensor."""
    scope.note("asked")
    if scope.root().noted & {"carried", "rewritten"} and not is_certain(fake, scope.root().certain):
        refuse_history(name)


def refuse_iterations(scope: GraphScope, carried: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Break where an iteration of a loop has asked such a thing, and a later iteration may find another answer.
    carried: what it found, and what it leaves."""
    if "asked" in scope.noted:
        if "rewritten" in scope.noted or any(a.requires_grad != b.requires_grad for a, b in carried):
            refuse_history("requires_grad")


def refuse_history(name: str) -> NoReturn:
    detail = "whether its value needs a gradient depends on the data, in a loop or branch"
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
    if not outcomes or not (is_kind(left, TensorProxy) and is_kind(right, TensorProxy)):
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
