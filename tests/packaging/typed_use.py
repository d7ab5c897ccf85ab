"""What type checkers know of captured functions; `make lint` checks it (mypy; pyright 1.1.414 agrees).

Each `type: ignore` is an error that is due.
"""

from __future__ import annotations

from typing import assert_type

import torch

from moebius import capture


@capture
def scaled(x: torch.Tensor, by: int = 2) -> torch.Tensor:
    return x * by


@capture(fullgraph=True, backend="eager")
def sizes(x: torch.Tensor) -> list[int]:
    return list(x.shape)


class Trainer:
    @capture
    def step(self, x: torch.Tensor) -> float:
        return x.sum().item()


def use() -> None:
    x = torch.ones(2)
    assert_type(scaled(x, by=3), torch.Tensor)
    assert_type(sizes(x), list[int])
    assert_type(Trainer().step(x), float)
    assert_type(capture(torch.nn.Linear(2, 2), dynamic=True), torch.nn.Linear)
    scaled("x")  # type: ignore[arg-type]
    capture(use, fullgrap=True)  # type: ignore[call-overload]
    capture(use, dynamic="yes")  # type: ignore[call-overload]
    scaled.export("step.mb")
