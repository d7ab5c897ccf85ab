"""``tolist()`` of a short vector of floats or of yes and no: numbers of the graph, as plain Python has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.tensors import numbers

LISTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x * 2,
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "bool": lambda x: x > 0,
    "gradient": lambda x: torch.autograd.grad((w := x.clone().requires_grad_()).exp().sum(), w)[0],
    "nothing": lambda x: x[:0],
    "written_after": lambda x: x[1:],
}


def returned(found: list, x: torch.Tensor, kept: Any) -> Any:
    return found, len(found), found[::-1]


def kept_for_later(found: list, x: torch.Tensor, kept: Any) -> Any:
    kept.log.append(found)
    kept.last = found[-1] if found else None
    return x


def computed_with(found: list, x: torch.Tensor, kept: Any) -> Any:
    return sum(found), [v * 2 for v in found], x * max([*found, 1.0])


def said(found: list, x: torch.Tensor, kept: Any) -> Any:
    return {f"loss/{i}": f"{v:.3f}" for i, v in enumerate(found)}


def changed(found: list, x: torch.Tensor, kept: Any) -> Any:
    found.append(1.5)
    found[0] = found[-1]
    return found, x.mul_(3)


def branched_on(found: list, x: torch.Tensor, kept: Any) -> Any:
    kept.n = kept.n + 1 if found and found[0] > 0 else 0
    return kept.n


USES = (returned, kept_for_later, computed_with, said, changed, branched_on)
CASES = list(itertools.product(LISTS, USES))


def results(step: Callable[..., Any]) -> list[str]:
    kept, generator = SimpleNamespace(log=[], last=None, n=0), torch.Generator().manual_seed(1)
    return [str((step(x.clone(), kept), kept)) for x in torch.randn(4, 5, generator=generator)]


def step_of(kind: str, use: Callable[..., Any]) -> Callable[..., Any]:
    def step(x: torch.Tensor, kept: Any) -> Any:
        vector = LISTS[kind](x)
        found = vector.tolist()
        if kind == "written_after":
            vector.add_(1)
        return use(found, x, kept)

    return step


@pytest.mark.parametrize(("kind", "use"), CASES, ids=[f"{kind}-{use.__name__}" for kind, use in CASES])
def test_as_plain_python_has_them(kind: str, use: Callable[..., Any]) -> None:
    step = step_of(kind, use)
    captured = capture(step, backend="eager")
    assert results(captured) == results(step)
    if use in (returned, said):
        assert stats(captured).breaks == 0


def test_switched_off_it_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "SHORT", -1)
    captured = capture(step_of("float", returned))
    results(captured)
    assert stats(captured).breaks
