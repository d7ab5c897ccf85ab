"""``f(*args)``: what a list or tuple holds is given with no code run, so a call may go on from within it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moebius import capture, stats

X_D = torch.arange(3.0)
GIVEN = {"a tuple": tuple, "a list": list, "an iterator": iter, "a map": lambda xs: map(lambda x: x + 0, xs)}


class Model:
    def __init__(self) -> None:
        self.calls = 0

    def capacity(self, *xs: torch.Tensor, **options: float) -> torch.Tensor:
        """JointVAE's: a plain number that counts, or numpy's."""
        self.calls += 1
        bound = min(self.calls * options["rate"], np.log(3))
        return (bound - xs[0].sum() + xs[1].mean()).abs()

    def table(self, *xs: torch.Tensor, **options: float) -> torch.Tensor:
        """What may fail on data, with a handler around it."""
        self.calls += 1
        try:
            return torch.stack(xs)[0][xs[1].long() * self.calls] * options["rate"]
        except IndexError:
            return xs[0] - self.calls


@pytest.mark.parametrize("name", ("capacity", "table"))
@pytest.mark.parametrize("given", GIVEN)
def test_as_in_python(given, name):
    def step(model):
        return getattr(model, name)(*GIVEN[given]([X_D, X_D / 4]), rate=0.25) * 2

    mine, plain, captured = Model(), Model(), capture(step, backend="eager")
    for _ in range(12):
        assert torch.equal(captured(mine), step(plain)) and mine.calls == plain.calls
    assert stats(captured).breaks == 0 or given in ("an iterator", "a map")
