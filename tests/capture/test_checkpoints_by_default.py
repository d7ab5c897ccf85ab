"""``checkpoint(f, x)`` without ``use_reentrant``: torch takes a form and warns of it; so does the captured step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from moebius import capture, stats

FORMS: dict[str, Callable[[nn.Sequential, torch.Tensor], torch.Tensor]] = {
    "called": checkpoint,
    "without random state": lambda part, x: checkpoint(part, x, preserve_rng_state=False),
    "in segments": lambda part, x: checkpoint_sequential(part, 2, x),
    "twice": lambda part, x: checkpoint(part, checkpoint(part, x)),
}


def calls(form: str, shown: str, backend: str | None) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    first, part = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4))
    parameters = [*first.parameters(), *part.parameters()]

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        for p in parameters:
            p.grad = None
        y = FORMS[form](part, first(x))
        y.sum().backward()
        return [y.detach(), *(p.grad for p in parameters if p.grad is not None)]

    run, found = step if backend is None else capture(step, backend=backend), []
    for seed in range(4):
        torch.manual_seed(seed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(shown)  # type: ignore[arg-type]
            try:
                result: Any = [t.tolist() for t in run(torch.randn(3, 4))]
            except UserWarning as error:
                result = str(error)
        found.append((result, [(str(t.message), t.category, t.filename, t.lineno) for t in told]))
    return found, None if backend is None else stats(run)


@pytest.mark.share(14)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("shown", ["always", "ignore", "error", "default"])
@pytest.mark.parametrize("form", FORMS)
def test_the_default_form_and_its_warning(form: str, shown: str, backend: str) -> None:
    plain, _ = calls(form, shown, None)
    ours, seen = calls(form, shown, backend)
    assert ours == plain
    assert seen.graphs == 1 and not seen.breaks
