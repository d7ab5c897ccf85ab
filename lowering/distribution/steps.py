"""Optimizers as they step: what they step on is averaged over the ranks, and all ranks take as many steps.

The hook is on all optimizers of the process. One that trains nothing of a mesh, outside of its captured calls, is left
alone, but for one question: did a captured call on the mesh run a backward for it? Then nobody has averaged that.
"""
from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.exchange import before_weights_change, group_of_all, remember_axis
from moebius.lowering.distribution.reduce import REDUCERS, are_of_a_mesh, is_averaged, reducer_of
from moebius.lowering.distribution.rendezvous import Call
from moebius.lowering.distribution.sharded import forget_copies
from moebius.lowering.step.optimizer_steps import ASKED, before_step, parameters_of
from moebius.lowering.torch_private import version_of

ALONE = (
    "{} parameters of an optimizer have gradients of this rank alone: a backward() reached them before the captured "
    "function was seen to train them (a model in a generator, behind __slots__, in another thread? parameters put in "
    "the place of others?); pass the model, or its optimizer, to the captured function"
)
strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that no mesh is seen to train


class Averaged:
    """What the hook on optimizers asks."""

    def may_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if Call.name or self.groups_of(parameters) or are_of_a_mesh(parameters):
            refuse([p for p in parameters if p.grad is not None and not is_averaged(p)])
        else:
            strangers.add(optimizer)

    def trained(self) -> Iterator[torch.Tensor]:
        for reducer in REDUCERS.values():
            found = [reducer.known[place].parameter() for place in reducer.ever]
            yield from (p for p in found if p is not None and p.requires_grad)

    def groups_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        meshes = {id(found.mesh): found.mesh for p in parameters if (found := reducer_of(p)) is not None}
        along = [remember_axis(mesh, axis) for mesh in meshes.values() for axis in range(mesh.ndim)]
        return (*along, *dict.fromkeys(name for mesh in meshes.values() for name in group_of_all(mesh)))

    def meet(self, groups: Sequence[str]) -> None:
        before_weights_change(groups)


def refuse(alone: list[torch.Tensor]) -> None:
    if alone:
        raise DistributionError(ALONE.format(len(alone)))


def look_at_optimizers() -> None:
    """From now on each optimizer is asked before it steps; those that there are already are known."""
    if not ASKED:
        ASKED.append(Averaged())
        register_optimizer_step_pre_hook(before_step)
    strangers.update(found for found in gc.get_objects() if torch.optim.Optimizer in type(found).__mro__)


@contextlib.contextmanager
def nothing_unseen() -> Iterator[None]:
    """Around a captured call on a mesh: raise where it leaves gradients for an optimizer that nobody averages."""
    forget_copies()
    before = []
    for optimizer in list(strangers):
        alone = [p for p in parameters_of(optimizer) if not is_averaged(p)]
        before += [(p, p.grad if p.grad is None else weakref.ref(p.grad), written(p)) for p in alone]
        if not alone:
            strangers.discard(optimizer)
    yield
    forget_copies()
    changed = [p for p, grad, count in before if grad is None or grad() is not p.grad or written(p) != count]
    refuse([p for p in changed if p.grad is not None and not is_averaged(p)])


def written(parameter: torch.Tensor) -> int:
    """How often the parameter's gradient was written."""
    return 0 if parameter.grad is None else version_of(parameter.grad)
