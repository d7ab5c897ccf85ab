"""Optimizer state that Python would not have yet, between the calls of a step that was captured with it.

A graph holds the state of each parameter that may get a gradient, made when it was captured. What a batch left without
a gradient, and never had one, has no state in Python: so between calls it has none here either, and the same tensors
are put in place again when the next call would be the graph's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bytecode.hidden_frames import hidden
from ..hook import finish
from ..torch_facts import torch_private


@dataclass(frozen=True, eq=False)
class StateAtCapture:
    """The state that was made for one parameter. made: each of its tensors by name, with its version when made.

    None of it keeps anything alive.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    parameter: weakref.ref[torch.Tensor]
    made: dict[str, tuple[weakref.ref[Any], int]] = field(default_factory=dict)

    def remember(self) -> None:
        """The state as it stands now is what was made."""
        optimizer, p = self.optimizer(), self.parameter()
        if optimizer is not None and p is not None:
            state = optimizer.state.get(p, {})
            tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
            self.made.update({n: (weakref.ref(v), torch_private.version_of(v)) for n, v in tensors.items()})

    def is_untouched(self) -> bool:
        """Whether the parameter has the state that was made, which no step has written to since."""
        optimizer, p = self.optimizer(), self.parameter()
        if optimizer is None or p is None:
            return False
        state = optimizer.state.get(p)
        if not state or state.keys() != self.made.keys():
            return False
        return all(
            reference() is state[name] and torch_private.version_of(state[name]) == version
            for name, (reference, version) in self.made.items()
        )


class DeferredState:
    """The state that captures of one callable have made."""

    def __init__(self, made: list[StateAtCapture]):
        self.made = made
        self.away: dict[StateAtCapture, Any] = {}  # the state that is out of its place

    def living(self, references: Iterable[StateAtCapture]) -> Iterator[tuple[StateAtCapture, Any, Any]]:
        """Those whose optimizer and parameter still live, with the two."""
        for made in references:
            optimizer, p = made.optimizer(), made.parameter()
            if optimizer is not None and p is not None:
                yield made, optimizer, p

    def park(self) -> None:
        """After a call that left parameters without gradients: what no step has updated since is out of its place."""
        self.away |= self.taken_out(made for made in self.made if made not in self.away)  # (those: by take_away)

    def taken_out(self, references: Iterable[StateAtCapture]) -> dict[StateAtCapture, Any]:
        """The state that no step has updated, taken out of their optimizers."""
        living = self.living(references)
        return {made: optimizer.state.pop(p) for made, optimizer, p in living if made.is_untouched()}

    def put_back(self) -> bool:
        """Before a call; whether there was anything to put back. What got another state meanwhile is not ours now."""
        waiting = self.living(self.away)
        self.away = {made: self.away[made] for made, optimizer, p in waiting if p not in optimizer.state}
        for made, optimizer, p in self.living(self.away):
            optimizer.state[p] = self.away[made]
        return bool(self.away)

    def take_away(self) -> None:
        """After that call: what got its first gradient stays."""
        self.away = self.taken_out(self.away)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` with the state in place."""

        @hidden
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return finish(run(*args, **kwargs))
            finally:
                self.take_away()

        return call
