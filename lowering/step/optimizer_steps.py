"""Steps of optimizers, where several ranks train together: how many there were, as each exchange compares it.

torch calls ``before_step`` before every step of every optimizer (``register_optimizer_step_pre_hook``) once a mesh is
in use. Capture takes that call for one node, ``count_step``: that the step may be taken is known when it is captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import fx


class Ranks(Protocol):
    """What knows of the ranks that train together (``distribution.steps``)."""

    def may_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises where it may not."""

    def trained(self) -> Iterable[torch.Tensor]:
        """The parameters that a backward of some rank has reached: all ranks have got their gradients."""

    def meet(self, groups: Sequence[str]) -> None:
        """Wait for those of these groups' ranks that have to come to this step too."""

    def groups_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The groups of ranks that train any of these."""


ASKED: list[Ranks] = []
TAKEN: Counter[str] = Counter()  # by name of a group of ranks: steps that this rank has taken


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """What torch calls."""
    for ranks in ASKED:
        ranks.may_step(optimizer)
    count_step(*counted_by(parameters_of(optimizer)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def counted_by(parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The groups of ranks that count a step on these."""
    return tuple(name for ranks in ASKED for name in ranks.groups_of(parameters))


def trained_on_ranks() -> dict[int, torch.Tensor]:
    """By id, the parameters that a backward of some rank has reached."""
    return {id(parameter): parameter for ranks in ASKED for parameter in ranks.trained()}


def count_step(*groups: str) -> None:
    """A step is taken that these groups of ranks count."""
    for ranks in ASKED:
        ranks.meet(groups)
    TAKEN.update(groups)


fx.wrap("count_step")
